"""Devices over memory of a GPU, or over memory that softcuda takes for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import anyio
import torch
from cuda.bindings import driver

from asyncache.core import AttentionPool, KVLayout, StatePool
from asyncache.devices import CudaDevice, PageOrder
from asyncache.devices._pool import TORCH_DTYPES
from tests.softcuda import SoftCuda

OUT_OF_MEMORY = int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
ILLEGAL_ADDRESS = int(driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
NUM_PAGES = 5
LAYOUT = KVLayout(
    model="m",
    page_tokens=4,
    pools=(
        AttentionPool(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"),
        StatePool(name="state", num_layers=2, shape=(3, 5), dtype="float32"),
    ),
)
KV = LAYOUT.space(LAYOUT.pools[0])
STATE = LAYOUT.space(LAYOUT.pools[1])


class Lie(Enum):
    """How the pages of a pool lie in memory."""

    PAGE_FIRST = auto()
    LAYER_FIRST = auto()
    TENSOR_A_LAYER = auto()
    GAPS = auto()


class Gpu:
    """What CUDA tests run on: softcuda, or a real GPU where that is None."""

    def __init__(self, softcuda: SoftCuda | None) -> None:
        self.softcuda = softcuda
        self._declared: list[torch.Tensor] = []
        self._devices: list[CudaDevice] = []
        self._streams: list[tuple[int, int]] = []
        self._contexts: dict[int, int] = {}

    def zeros(
        self, shape: list[int], dtype: torch.dtype, ordinal: int = 0
    ) -> torch.Tensor:
        """Return zeros in the memory of a GPU."""
        if self.softcuda is None:
            return torch.zeros(shape, dtype=dtype, device=torch.device("cuda", ordinal))
        tensor = torch.zeros(shape, dtype=dtype)
        self.softcuda.declare(tensor, device=ordinal)
        self._declared.append(tensor)
        return tensor

    def device(
        self,
        lie: Lie = Lie.PAGE_FIRST,
        *,
        layout: KVLayout = LAYOUT,
        num_pages: int = NUM_PAGES,
        ordinal: int = 0,
        **options: object,
    ) -> CudaDevice:
        """Return a device over new tensors."""
        tensors = {
            pool.name: self.pool(lie, layout.space(pool), num_pages, ordinal)
            for pool in layout.pools
        }
        order = (
            PageOrder.LAYER_FIRST if lie is Lie.LAYER_FIRST else PageOrder.PAGE_FIRST
        )
        device = CudaDevice.adopt(
            layout, tensors, order=order, ordinal=ordinal, **options
        )
        self._devices.append(device)
        return device

    def pool(self, lie, space, num_pages, ordinal=0):
        num_layers, *shape = space.shape
        dtype = TORCH_DTYPES[space.dtype]
        if lie is Lie.TENSOR_A_LAYER:
            return [
                self.zeros([num_pages, *shape], dtype, ordinal)
                for _ in range(num_layers)
            ]
        if lie is Lie.LAYER_FIRST:
            return self.zeros([num_layers, num_pages, *shape], dtype, ordinal)
        gap = 2 if lie is Lie.GAPS else 0
        whole = self.zeros([num_pages, num_layers + gap, *shape], dtype, ordinal)
        return whole[:, :num_layers]

    @contextmanager
    def current(self, ordinal: int = 0) -> Iterator[int]:
        """Have the context of a GPU current, as torch has it."""
        if ordinal not in self._contexts:
            self._contexts[ordinal] = ok(driver.cuDevicePrimaryCtxRetain(ordinal))
        ok(driver.cuCtxPushCurrent(self._contexts[ordinal]))
        try:
            yield int(self._contexts[ordinal])
        finally:
            ok(driver.cuCtxPopCurrent())

    def stream(self, ordinal: int = 0) -> int:
        """Return a stream of the embedder."""
        ok(driver.cuInit(0))
        with self.current(ordinal):
            stream = int(ok(driver.cuStreamCreate(1)))
        self._streams.append((ordinal, stream))
        return stream

    def is_idle(self, stream: int) -> bool:
        """Whether a stream has run all that it was given."""
        with self.current():
            (code,) = driver.cuStreamQuery(stream)
        return code == driver.CUresult.CUDA_SUCCESS

    def synchronize(self, stream: int) -> None:
        """Block until a stream has run all that it was given."""
        with self.current():
            ok(driver.cuStreamSynchronize(stream))

    def close(self) -> None:
        """Give back what the test had; the threads of a test that failed, too."""
        for device in self._devices:
            for waiter in device._waiters:
                waiter.stop()
            device._pinned._executor.shutdown(wait=False)
        for ordinal, stream in self._streams:
            ok(driver.cuCtxPushCurrent(self._contexts[ordinal]))
            driver.cuStreamDestroy(stream)
            driver.cuCtxPopCurrent()
        for ordinal in self._contexts:
            driver.cuDevicePrimaryCtxRelease(ordinal)
        for tensor in self._declared:
            self.softcuda.undeclare(tensor)


def ok(result):
    """Return what the driver returned, which is no error."""
    code, *values = result
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return values[0] if values else None


def content(num_pages: int = 1, space=KV, num_layers: int | None = None) -> bytearray:
    """Return bytes for pages, no two alike."""
    layers = space.num_layers if num_layers is None else num_layers
    num_bytes = num_pages * layers * space.layer_bytes
    return bytearray((7 * i + i // 251) % 256 for i in range(num_bytes))


def held(device: CudaDevice, pages, pool: str = "kv") -> bytes:
    """Return the bytes of pages, as they are in memory now, by no copy."""
    num_layers = {space.name: space for space in device.layout.pools}[pool].num_layers
    return b"".join(
        raw(device.layer(pool, layer)[page])
        for page in pages
        for layer in range(num_layers)
    )


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


class Told:
    """A call that says when it is made, to the event loop and to threads."""

    def __init__(self) -> None:
        self.count = 0
        self.thread = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._over = anyio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.thread.set()
        self._loop.call_soon_threadsafe(self._over.set)

    async def wait(self) -> None:
        with anyio.fail_after(10):
            await self._over.wait()


def device_threads() -> set[threading.Thread]:
    """Return the threads of devices that run."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("asyncache-")
    }
