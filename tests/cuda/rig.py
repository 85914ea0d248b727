"""A whole engine on the software driver: files, and tensors that play device memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cuda

from asyncache.core import KVLayout, PageKey
from asyncache.devices import CudaDevice
from asyncache.devices._pool import TORCH_DTYPES
from asyncache.stores import FileStore, Status
from asyncache.stores._page_files import PageFiles, PageReader
from tests.engine.scene import LAYOUT, POISON
from tests.engine.stage import MEANT, PAGE_BYTES, STORED, Place, Scenario, Stage, staged
from tests.softcuda import SoftCuda

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
NON_BLOCKING = 1
PLAIN_CALLS = {"cuEventCreate"}
"""Calls that enqueue nothing."""


@contextmanager
def device_memory(
    softcuda: SoftCuda, layout: KVLayout, num_pages: int, ordinal: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a poisoned tensor a pool, each of which plays memory of a GPU."""
    tensors = {
        pool.name: torch.full(
            (num_pages, *layout.space(pool).shape),
            POISON,
            dtype=TORCH_DTYPES[layout.space(pool).dtype],
        )
        for pool in layout.pools
    }
    for tensor in tensors.values():
        softcuda.declare(tensor, device=ordinal)
    try:
        yield tensors
    finally:
        for tensor in tensors.values():
            softcuda.undeclare(tensor)


@asynccontextmanager
async def gpu(
    softcuda: SoftCuda,
    num_pages: int = 8,
    *,
    layout: KVLayout = LAYOUT,
    ordinal: int = 0,
    **arguments: Any,
) -> AsyncIterator[CudaDevice]:
    """Open a device; at its end all that it took from the driver has gone back."""
    with device_memory(softcuda, layout, num_pages, ordinal) as tensors:
        device = CudaDevice.adopt(layout, tensors, ordinal=ordinal, **arguments)
        try:
            yield device
        finally:
            await device.aclose()


class Model:
    """An embedder's stream, and a forward on it that is copies within device memory.

    So a gate may hold a forward, or the copies of the engine, or both.
    """

    def __init__(self, softcuda: SoftCuda, ordinal: int = 0) -> None:
        self._softcuda = softcuda
        self._ordinal = ordinal
        self._scratch: list[torch.Tensor] = []
        call(cuda.cuInit(0))
        self._context = call(cuda.cuDevicePrimaryCtxRetain(ordinal))
        with self._current():
            self.stream = int(call(cuda.cuStreamCreate(NON_BLOCKING)))

    def write(self, target: torch.Tensor, data: bytes) -> None:
        """Have the stream write bytes to a page, or to a part of it."""
        source = self._take(len(data))
        source[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._copy(target.data_ptr(), source.data_ptr(), len(data))

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """Have the stream read a page; return what holds its bytes afterwards."""
        target = self._take(source.nbytes)
        self._copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        return target

    def run(self) -> None:
        """Block until the stream has run all that it was given."""
        with self._current():
            call(cuda.cuStreamSynchronize(self.stream))

    @property
    def is_done(self) -> bool:
        """Whether it has run all that it was given."""
        with self._current():
            return cuda.cuStreamQuery(self.stream)[0] == 0

    def close(self) -> None:
        with self._current():
            cuda.cuStreamSynchronize(self.stream)
            cuda.cuStreamDestroy(self.stream)
        cuda.cuDevicePrimaryCtxRelease(self._ordinal)
        for tensor in self._scratch:
            self._softcuda.undeclare(tensor)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        with self._current():
            call(cuda.cuMemcpyAsync(target, source, num_bytes, self.stream))

    def _take(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.full([num_bytes], POISON, dtype=torch.uint8)
        self._softcuda.declare(tensor, device=self._ordinal)
        self._scratch.append(tensor)
        return tensor

    @contextmanager
    def _current(self) -> Iterator[None]:
        call(cuda.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent()


def call(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver returned, or raise."""
    code, *values = result
    if code != 0:
        raise RuntimeError(f"the driver returned {code}")
    return values[0] if values else None


@contextmanager
def model(softcuda: SoftCuda, ordinal: int = 0) -> Iterator[Model]:
    """Lend a model; at the end of the block its stream has run all."""
    lent = Model(softcuda, ordinal)
    try:
        yield lent
    finally:
        lent.close()


class Injection:
    """An error that the driver meets at one of its calls, while a scenario plays."""

    def __init__(self, softcuda: SoftCuda, function: str, nth: int) -> None:
        self._softcuda = softcuda
        self._function = function
        self._nth = nth
        self._before = softcuda.count(function)
        self._num_calls: int | None = None

    @property
    def num_calls(self) -> int:
        """Calls that it met."""
        if self._num_calls is not None:
            return self._num_calls
        return self._softcuda.count(self._function) - self._before

    @property
    def has_come(self) -> bool:
        """Whether there was such a call."""
        return self.num_calls >= self._nth

    def refuse(self) -> None:
        """Have the call refused, which does nothing then."""
        self._softcuda.refuse(self._function, OUT_OF_MEMORY, nth=self._nth)

    def poison(self) -> None:
        """Have what the call enqueues kill the context."""
        self._softcuda.poison(self._function, ILLEGAL_ADDRESS, nth=self._nth)

    def remove(self) -> None:
        """Let every later call work."""
        self._num_calls = self.num_calls
        self._softcuda.refuse(self._function, 0, nth=0)
        if self._function not in PLAIN_CALLS:
            self._softcuda.poison(self._function, 0, nth=0)


class KeptFiles(FileStore):
    """A store of files which knows how often it was opened, and what lies in it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, num_threads=2)
        self.num_opened = self.num_closed = 0

    async def open(self) -> None:
        await super().open()
        self.num_opened += 1

    async def aclose(self) -> None:
        await super().aclose()
        self.num_closed += 1

    @property
    def pages(self) -> dict[PageKey, bytes]:
        """Every page that is there, by its key; one that nobody knows is an error."""
        found = {key: page for key in MEANT if (page := self._read(key)) is not None}
        assert sum(1 for _ in Path(self._directory).rglob("*.kv")) == len(found)
        return found

    def _read(self, key: PageKey) -> bytes | None:
        page, directory = bytearray(PAGE_BYTES), f"{self._directory}/{key.space.name}"
        files = PageFiles(directory, "", key.space, digests=True, durable=False)
        reader = PageReader(files, None)
        status = reader.read(key.hash, [memoryview(page)], used_ns=0)
        assert status in {Status.HIT, Status.MISS}, (key, status)
        return bytes(page) if status is Status.HIT else None


class Shelf:
    """Makes stores of files that hold what each scenario begins with."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    async def fill(self) -> None:
        async with FileStore(self._directory / "first") as store:
            pages = [[memoryview(page)] for page in STORED.values()]
            await store.put(list(STORED), pages)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[KeptFiles]:
        """Lend a store, until the end of the block."""
        self._count += 1
        directory = self._directory / str(self._count)
        # Pages are written once and never changed, so that they may be shared.
        shutil.copytree(self._directory / "first", directory, copy_function=os.link)
        store = KeptFiles(directory)
        try:
            yield store
        finally:
            await store.aclose()
            shutil.rmtree(directory)


@asynccontextmanager
async def on_gpu(
    softcuda: SoftCuda, shelf: Shelf | None, scenario: Scenario
) -> AsyncIterator[Stage]:
    """Open what a scenario needs, with a GPU; with files, if there is a shelf."""
    async with (
        nullcontext() if shelf is None else shelf.store() as store,
        gpu(softcuda, scenario.num_pages) as device,
        staged(scenario, Place.LAYERED, device=device, store=store) as stage,
    ):
        yield stage
    assert softcuda.leftovers() == {}
