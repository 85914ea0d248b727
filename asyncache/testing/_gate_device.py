"""A device whose copies from and to the host stop half-way, at gates that a test opens.

While a copy is held, the first half of each page is new and the rest is old, as it may
be at any moment of a real copy. A copy that has begun cannot be recalled: cancelled,
the call goes on waiting at the gate, finishes, and raises only then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from asyncache.core import DeviceError, KVLayout
from asyncache.devices import Copy, Device
from asyncache.testing._gate import Gate

if TYPE_CHECKING:
    import torch

ByteString = bytes | bytearray | memoryview


class GateDevice(Device):
    """A device around another, as far from the host as an accelerator.

    Args:
        inner: Does the copies; it is closed with this device.
        is_open: Whether the gates are open before the test closes them.

    Attributes:
        write_gate: Holds each :meth:`start_write`.
        read_gate: Holds each :meth:`start_read`.
    """

    def __init__(self, inner: Device, *, is_open: bool = False) -> None:
        self.layout = inner.layout
        self.num_pages: Mapping[str, int] = inner.num_pages
        self.host_addressable = False
        self.write_gate = Gate(is_open=is_open)
        self.read_gate = Gate(is_open=is_open)
        self._inner = inner

    def __repr__(self) -> str:
        """Show the gates."""
        return f"<GateDevice write={self.write_gate!r} read={self.read_gate!r}>"

    def tensor(self, pool: str) -> torch.Tensor:
        return self._inner.tensor(pool)

    def page_views(
        self,
        pool: str,
        pages: Sequence[int],  # noqa: ARG002 - the contract's
        layers: range | None = None,  # noqa: ARG002 - the contract's
    ) -> list[list[memoryview]]:
        raise DeviceError(f"pool {pool!r} is not addressable by the host")

    def start_write(
        self,
        pool: str,
        pages: Sequence[int],
        source: memoryview,
        layers: range | None = None,
    ) -> Copy:
        old = self._contents(pool, pages, layers)
        torn = halves(source, old, len(pages))
        self._inner.start_write(pool, pages, memoryview(torn), layers).block()

        async def copy() -> None:
            await self.write_gate.pass_through()
            await self._inner.start_write(pool, pages, source, layers).wait()

        return TaskCopy(copy)

    def start_read(
        self,
        pool: str,
        pages: Sequence[int],
        target: memoryview,
        layers: range | None = None,
    ) -> Copy:
        old = bytes(target)
        self._inner.start_read(pool, pages, target, layers).block()
        early = bytes(target)
        target[:] = halves(early, old, len(pages))

        async def copy() -> None:
            await self.read_gate.pass_through()
            late = self._contents(pool, pages, layers)
            target[:] = halves(early, late, len(pages))

        return TaskCopy(copy)

    def copy_pages(
        self,
        pool: str,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        stream: int | None = None,
    ) -> None:
        self._inner.copy_pages(pool, sources, targets, stream=stream)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _contents(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> bytearray:
        num_bytes = page_bytes(self.layout, pool, layers)
        contents = bytearray(len(pages) * num_bytes)
        self._inner.start_read(pool, pages, memoryview(contents), layers).block()
        return contents


class TaskCopy(Copy):
    """A copy that a task makes, whatever becomes of whoever waits for it."""

    _tasks: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        super().__init__()
        task = asyncio.create_task(self._run(work))  # noqa: TID251 - a copy outlives all
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        error: BaseException | None = None
        try:
            await work()
        except BaseException as raised:  # noqa: BLE001 - it is the copy's, and is told
            error = raised
        self.finish(error)

    def block(self) -> None:
        """Do nothing: where there is no loop any more, no task copies any more."""


def page_bytes(layout: KVLayout, pool: str, layers: range | None = None) -> int:
    """Return the bytes of these layers of one page of a pool."""
    for candidate in layout.pools:
        if candidate.name == pool:
            space = layout.space(candidate)
            num_layers = space.num_layers if layers is None else len(layers)
            return num_layers * space.layer_bytes
    names = sorted(candidate.name for candidate in layout.pools)
    raise ValueError(f"pool must be one of {names}, not {pool!r}")


def halves(head: ByteString, tail: ByteString, count: int) -> bytearray:
    """Return pages of which the first half is a head's and the rest a tail's."""
    if len(head) != len(tail):
        raise ValueError(f"pages of {len(tail)} bytes, a buffer of {len(head)}")
    torn = bytearray(tail)
    size = len(torn) // count if count else 0
    for start in range(0, size * count, size or 1):
        middle = start + size // 2
        torn[start:middle] = head[start:middle]
    return torn
