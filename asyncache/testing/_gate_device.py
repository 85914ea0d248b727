"""A device whose copies from and to the host stop half-way, at gates that a test opens.

While a copy is held, the first half of each page is new and the rest is old, as it may
be at any moment of a real copy. A copy that has begun cannot be recalled: cancelled,
the call goes on waiting at the gate, finishes, and raises only then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from asyncache.core import AsyncacheError, DeviceError, KVLayout
from asyncache.devices import Device
from asyncache.testing._gate import Gate

if TYPE_CHECKING:
    import torch

Buffers = Sequence[Sequence[memoryview]]


class GateDevice(Device):
    """A device around another, as far from the host as an accelerator.

    Args:
        inner: Does the copies; it is closed with this device.
        is_open: Whether the gates are open before the test closes them.

    Attributes:
        write_gate: Holds each :meth:`write_pages`.
        read_gate: Holds each :meth:`read_pages`.
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

    async def write_pages(
        self,
        pool: str,
        pages: Sequence[int],
        sources: Buffers,
        layers: range | None = None,
    ) -> None:
        async def copy() -> None:
            old = await self._contents(pool, pages, layers)
            torn = _halves(_joined(sources), old)
            await self._inner.write_pages(pool, pages, _buffers(torn), layers)
            await self.write_gate.pass_through()
            await self._inner.write_pages(pool, pages, sources, layers)

        await _run_to_end(copy)

    async def read_pages(
        self,
        pool: str,
        pages: Sequence[int],
        targets: Buffers,
        layers: range | None = None,
    ) -> None:
        async def copy() -> None:
            old = _joined(targets)
            await self._inner.read_pages(pool, pages, targets, layers)
            early = _joined(targets)
            _fill(targets, _halves(early, old))
            await self.read_gate.pass_through()
            late = await self._contents(pool, pages, layers)
            _fill(targets, _halves(early, late))

        await _run_to_end(copy)

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

    async def _contents(
        self, pool: str, pages: Sequence[int], layers: range | None = None
    ) -> list[bytes]:
        num_bytes = page_bytes(self.layout, pool, layers)
        contents = [bytearray(num_bytes) for _ in pages]
        await self._inner.read_pages(pool, pages, _buffers(contents), layers)
        return [bytes(page) for page in contents]


def page_bytes(layout: KVLayout, pool: str, layers: range | None = None) -> int:
    """Return the bytes of these layers of one page of a pool."""
    for candidate in layout.pools:
        if candidate.name == pool:
            space = layout.space(candidate)
            num_layers = space.num_layers if layers is None else len(layers)
            return num_layers * space.layer_bytes
    names = sorted(candidate.name for candidate in layout.pools)
    raise ValueError(f"pool must be one of {names}, not {pool!r}")


async def _run_to_end(copy: Callable[[], Awaitable[None]]) -> None:
    """Run a copy that has begun to its end, whatever becomes of the caller.

    A task group waits for its children through any number of ``task.cancel()``.
    """
    await anyio.lowlevel.checkpoint()
    failures: list[Exception] = []

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                await copy()
            except (AsyncacheError, TypeError, ValueError) as error:
                failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
    for failure in failures:
        raise failure


def _halves(heads: Sequence[bytes], tails: Sequence[bytes]) -> list[bytes]:
    """Return pages of which the first half is a head's and the rest a tail's."""
    torn = []
    for head, tail in zip(heads, tails, strict=True):
        if len(head) != len(tail):
            raise ValueError(f"a page has {len(tail)} bytes, its buffers {len(head)}")
        middle = len(head) // 2
        torn.append(head[:middle] + tail[middle:])
    return torn


def _joined(pages: Buffers) -> list[bytes]:
    return [b"".join(buffers) for buffers in pages]


def _buffers(pages: Sequence[bytes | bytearray]) -> Buffers:
    return [[memoryview(page)] for page in pages]


def _fill(targets: Buffers, pages: Sequence[bytes]) -> None:
    for buffers, page in zip(targets, pages, strict=True):
        offset = 0
        for buffer in buffers:
            buffer.cast("B")[:] = page[offset : offset + buffer.nbytes]
            offset += buffer.nbytes
