"""What every device must do, whoever wrote it: run it on yours."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random

import anyio
import torch

from asyncache.core import ClosedError, DeviceError
from asyncache.devices import Device
from asyncache.testing._gate_device import page_bytes
from asyncache.testing._nth import cancel_nth, noting

NUM_PAGES = 4
ALL_PAGES = range(NUM_PAGES)


async def check_device(make: Callable[[], Device]) -> None:
    """Check that a device keeps the contract of :class:`Device`.

    Args:
        make: Returns a new device with at least 4 pages in each pool; it is called
            many times, and what it returns is overwritten and closed.

    Raises:
        AssertionError: If the device breaks the contract; a note names the check and
            the pool.
    """
    async with _opened(make) as device:
        pools = [pool.name for pool in device.layout.pools]
    for check in _CHECKS:
        for pool in pools:
            with noting(f"{check.__name__}, pool {pool!r}"):
                async with _opened(make) as device:
                    await check(_Subject(device, pool))
    for scenario, check in _CANCELLATIONS:
        for pool in pools:
            with noting(f"{scenario.__name__}, pool {pool!r}"):
                await cancel_nth(
                    scenario, fresh=partial(_subject, make, pool), check=check
                )
    with noting(_check_close.__name__):
        await _check_close(make())


@dataclass(frozen=True, slots=True)
class _Subject:
    """One pool of a device, and memory to copy from and to."""

    device: Device
    pool: str
    random: Random = field(default_factory=partial(Random, 0))
    memory: bytearray = field(default_factory=bytearray)

    @property
    def num_layers(self) -> int:
        pools = {pool.name: pool for pool in self.device.layout.pools}
        return pools[self.pool].num_layers

    @property
    def layer_ranges(self) -> list[range]:
        """Runs of layers worth a check: all, the first, the last, the inner ones."""
        num = self.num_layers
        runs = {range(num), range(1), range(num - 1, num), range(1, num - 1)}
        return sorted((run for run in runs if len(run)), key=lambda run: run.start)

    def tensor(self) -> torch.Tensor | None:
        """Return the pool's tensor; None if its owner has a tensor a layer."""
        try:
            return self.device.tensor(self.pool)
        except DeviceError:
            return None

    def contents(self, count: int, layers: range | None = None) -> list[bytes]:
        num_bytes = page_bytes(self.device.layout, self.pool, layers)
        return [self.random.randbytes(num_bytes) for _ in range(count)]

    async def write(
        self,
        pages: Sequence[int],
        contents: Sequence[bytes],
        layers: range | None = None,
    ) -> None:
        source = memoryview(b"".join(contents))
        await self.device.write_pages(self.pool, pages, source, layers)

    async def settle(self) -> None:
        """Wait until the current stream has run all that it was given."""
        loop, done = asyncio.get_running_loop(), anyio.Event()
        self.device.when_done(None, lambda: loop.call_soon_threadsafe(done.set))
        await done.wait()

    async def read(
        self, pages: Sequence[int], layers: range | None = None
    ) -> list[bytes]:
        num_bytes = page_bytes(self.device.layout, self.pool, layers)
        target = bytearray(num_bytes * len(pages))
        await self.device.read_pages(self.pool, pages, memoryview(target), layers)
        starts = range(0, len(target), num_bytes)
        return [bytes(target[start : start + num_bytes]) for start in starts]


async def _check_shape(subject: _Subject) -> None:
    device, pool = subject.device, subject.pool
    _expect(set(device.num_pages) == {p.name for p in device.layout.pools}, "num_pages")
    _expect(device.num_pages[pool] >= NUM_PAGES, f"needs {NUM_PAGES} pages a pool")
    tensor = subject.tensor()
    if tensor is None:
        return
    _expect(tensor.shape[0] == device.num_pages[pool], "a tensor's first axis: pages")
    _expect(tensor.shape[1] == subject.num_layers, "a tensor's second axis: layers")


async def _check_tensor(subject: _Subject) -> None:
    contents = subject.contents(2)
    await subject.write([3, 1], contents)
    tensor = subject.tensor()
    if tensor is None:
        return
    for page, content in zip([3, 1], contents, strict=True):
        raw = tensor[page].contiguous().flatten().view(torch.uint8)
        _expect(bytes(raw.tolist()) == content, "tensor() shows the pages")
    tensor[3].zero_()
    await subject.settle()
    (content,) = await subject.read([3])
    _expect(not any(content), "tensor() is the pages themselves")


async def _check_views(subject: _Subject) -> None:
    device, pool = subject.device, subject.pool
    if not device.host_addressable:
        with _raises(DeviceError):
            device.page_views(pool, [0])
        return
    await subject.write(ALL_PAGES, subject.contents(NUM_PAGES))
    for layers in subject.layer_ranges:
        before = await subject.read([2, 0], layers)
        views = device.page_views(pool, [2, 0], layers)
        _expect([b"".join(page) for page in views] == before, "views show the pages")
        for view in (view for page in views for view in page):
            _expect(view.format == "B" and not view.readonly, "views are bytes")
            view[:] = bytes(byte ^ 0xFF for byte in view)
        inverted = [bytes(byte ^ 0xFF for byte in page) for page in before]
        _expect(await subject.read([2, 0], layers) == inverted, "views write through")


async def _check_whereabouts(subject: _Subject) -> None:
    device, pool = subject.device, subject.pool
    try:
        spans = device.spans()
    except DeviceError:
        with _raises(DeviceError):
            device.whereabouts(pool, [0])
        return
    contents = subject.contents(NUM_PAGES)
    await subject.write(ALL_PAGES, contents)
    addresses, sizes = device.whereabouts(pool, [2, 0])
    _expect(sum(sizes) == len(contents[0]), "a page's pieces are all of it")
    held = [range(span.address, span.address + span.num_bytes) for span in spans]
    for low, high in itertools.pairwise(held):
        _expect(low.stop <= high.start, "spans are disjoint, in order")
    for row, content in zip(addresses, (contents[2], contents[0]), strict=True):
        pieces = list(zip(row, sizes, strict=True))
        for start, size in pieces:
            is_held = any(start in span and start + size <= span.stop for span in held)
            _expect(is_held, "each piece lies in a span")
        if device.host_addressable:
            data = b"".join(itertools.starmap(ctypes.string_at, pieces))
            _expect(data == content, "pages are where the device says")


async def _check_round_trip(subject: _Subject) -> None:
    for layers in subject.layer_ranges:
        expected = subject.contents(NUM_PAGES)
        await subject.write(ALL_PAGES, expected)
        new = subject.contents(2, layers)
        await subject.write([3, 1], new, layers)
        _expect(await subject.read([3, 1], layers) == new, "what is written is read")
        layer_bytes = len(new[0]) // len(layers)
        first, stop = layers.start * layer_bytes, layers.stop * layer_bytes
        for page, content in zip([3, 1], new, strict=True):
            expected[page] = expected[page][:first] + content + expected[page][stop:]
        _expect(await subject.read(ALL_PAGES) == expected, "nothing else is written")


async def _check_staging(subject: _Subject) -> None:
    """Staging memory is memory, and copies go through it."""
    contents = subject.contents(NUM_PAGES)
    num_bytes = NUM_PAGES * len(contents[0])
    device, pool = subject.device, subject.pool
    memory = await device.allocate_staging(num_bytes + 1)
    _expect(memory.nbytes == num_bytes + 1 and memory.format == "B", "bytes as asked")
    _expect(not any(memory), "staging memory begins as zeros")
    memory[:num_bytes] = b"".join(contents)
    await device.write_pages(pool, ALL_PAGES, memory[:num_bytes])
    _expect(await subject.read(ALL_PAGES) == contents, "from staging into pages")
    await device.read_pages(pool, [2, 1], memory[1 : 1 + 2 * len(contents[0])])
    there = bytes(memory[1 : 1 + 2 * len(contents[0])])
    _expect(there == contents[2] + contents[1], "from pages into staging")
    await device.free_staging(memory)


async def _check_copies(subject: _Subject) -> None:
    """Copies go on by themselves, and say when they are over, once."""
    contents, over = subject.contents(2), list[int]()
    source = memoryview(b"".join(contents))
    copies = [
        subject.device.start_write(subject.pool, pages, source)
        for pages in ([3, 1], [0, 2])
    ]
    for number, copy in enumerate(copies):
        copy.when_over(partial(over.append, number))
    for copy in reversed(copies):
        await copy.wait()
        _expect(copy.is_over and copy.error is None, "a copy that is over")
    _expect(sorted(over) == [0, 1], "each copy tells once that it is over")
    copies[0].when_over(over.clear)
    _expect(not over, "and at once if it is already")
    found = await subject.read([0, 2, 3, 1])
    _expect(found == contents * 2, "each copy brings its pages")


async def _check_copy(subject: _Subject) -> None:
    contents = subject.contents(NUM_PAGES)
    await subject.write(ALL_PAGES, contents)
    subject.device.copy_pages(subject.pool, [2, 2], [0, 3])
    await subject.settle()
    expected = [contents[page] for page in (2, 1, 2, 2)]
    _expect(await subject.read(ALL_PAGES) == expected, "pages are copied, no others")


async def _check_nothing(subject: _Subject) -> None:
    await subject.write([], [])
    _expect(await subject.read([]) == [], "nothing is read")
    subject.device.copy_pages(subject.pool, [], [])


async def _check_bad_input(subject: _Subject) -> None:
    device, pool, num_layers = subject.device, subject.pool, subject.num_layers
    contents = subject.contents(NUM_PAGES)
    await subject.write(ALL_PAGES, contents)
    one, two = subject.contents(1), subject.contents(2)
    for bad in ([-1], [device.num_pages[pool]], [1, 1]):
        with _raises(ValueError):
            await subject.write(bad, subject.contents(len(bad)))
        with _raises(ValueError):
            device.copy_pages(pool, [0, 2][: len(bad)], bad)
    for bad in ([-1], [device.num_pages[pool]]):
        with _raises(ValueError):
            await subject.read(bad)
    for layers in (range(num_layers + 1), range(-1, 1), range(0)):
        with _raises(ValueError):
            await subject.write([0], one, layers)
    for sources in (two, [one[0][:-1]], [one[0] + one[0]], [b""]):
        with _raises(ValueError):
            await subject.write([0], sources)
    with _raises(ValueError):
        device.copy_pages(pool, [0, 1], [1, 2])
    with _raises(ValueError):
        device.copy_pages(pool, [0, 1], [2])
    with _raises(ValueError):
        await device.write_pages(f"no_{pool}", [], memoryview(b""))
    with _raises(ValueError):
        await device.read_pages(pool, [0], memoryview(one[0]))
    _expect(await subject.read(ALL_PAGES) == contents, "bad input changes nothing")


async def _check_close(device: Device) -> None:
    pool = device.layout.pools[0].name
    await device.aclose()
    await device.aclose()
    with _raises(ClosedError):
        await device.write_pages(pool, [], memoryview(b""))
    with _raises(ClosedError):
        device.tensor(pool)


async def _cancelled_write(subject: _Subject) -> None:
    subject.memory[:] = b"".join(subject.contents(NUM_PAGES))
    source = memoryview(subject.memory)
    await subject.device.write_pages(subject.pool, ALL_PAGES, source)


async def _cancelled_read(subject: _Subject) -> None:
    subject.memory[:] = b"".join(subject.contents(NUM_PAGES))
    target = memoryview(subject.memory)
    await subject.device.read_pages(subject.pool, ALL_PAGES, target)


async def _check_pages_are_left_alone(subject: _Subject) -> None:
    contents = subject.contents(NUM_PAGES)
    await subject.write(ALL_PAGES, contents)
    subject.memory[:] = bytes(len(subject.memory))
    _expect(await subject.read(ALL_PAGES) == contents, "no write after the return")


async def _check_targets_are_left_alone(subject: _Subject) -> None:
    subject.memory[:] = bytes(len(subject.memory))
    await subject.write(ALL_PAGES, subject.contents(NUM_PAGES))
    await subject.read(ALL_PAGES)
    _expect(not any(subject.memory), "no read after the return")


@asynccontextmanager
async def _opened(make: Callable[[], Device]) -> AsyncIterator[Device]:
    device = make()
    try:
        yield device
    finally:
        await device.aclose()


@asynccontextmanager
async def _subject(make: Callable[[], Device], pool: str) -> AsyncIterator[_Subject]:
    async with _opened(make) as device:
        yield _Subject(device, pool)


def _expect(holds: bool, law: str) -> None:  # noqa: FBT001 - a law's truth
    if not holds:
        raise AssertionError(law)


@contextmanager
def _raises(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


_CHECKS = (
    _check_shape,
    _check_tensor,
    _check_views,
    _check_whereabouts,
    _check_round_trip,
    _check_staging,
    _check_copies,
    _check_copy,
    _check_nothing,
    _check_bad_input,
)
_CANCELLATIONS = (
    (_cancelled_write, _check_pages_are_left_alone),
    (_cancelled_read, _check_targets_are_left_alone),
)
