"""MooncakeLinker beside the bare client: the same pages, the same node, one thread."""

from __future__ import annotations

import asyncio
import os
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from asyncache.core import LoadPlan, Moved, OffloadPlan
from asyncache.linkers import MooncakeLinker, Outcome
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import BATCH_BYTES, KIB, MIB, Pages
from tests.linkers.mooncake_server import (
    Master,
    bare_client,
    running_master,
    running_node,
    why_not,
)

# Of the bare client's: at most a tenth more time.
BOUND = 1 / 1.1


def run(num_rounds: int) -> Iterator[Row]:
    """Load and offload pages of two sizes."""
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return
    with ExitStack() as stack:
        master = stack.enter_context(running_master())
        stack.enter_context(running_node(master, 512 * MIB))
        for page_bytes in (256 * KIB, 2 * MIB):
            with _Bench(master, page_bytes) as bench:
                yield from asyncio.run(bench.measure(num_rounds))


class _Bench(Pages):
    """Pages of one size on a node and in a device."""

    def __init__(self, master: Master, page_bytes: int) -> None:
        super().__init__(page_bytes, BATCH_BYTES // page_bytes)
        self._master = master
        self._table = self.device.whereabouts("kv", range(self.num_pages))

    async def measure(self, num_rounds: int) -> list[Row]:
        with bare_client(self._master) as client:
            plain, checked = (
                MooncakeLinker(client, self.device, prefix=prefix, checksums=checksums)
                for prefix, checksums in (("plain", False), ("checked", True))
            )
            kinds = ((plain, "no checksums", BOUND), (checked, "checksums", None))
            rows = [
                row
                for linker, kind, bound in kinds
                async for row in self._rows(linker, client, num_rounds, kind, bound)
            ]
            client.remove_by_regex(".*", True)
        return rows

    async def _rows(
        self,
        linker: MooncakeLinker,
        client: Any,
        num_rounds: int,
        kind: str,
        bound: float | None,
    ) -> AsyncIterator[Row]:
        # One after the other: the memory of the pools is registered by one at a time.
        await linker.open()
        await linker.offload(self._plan(OffloadPlan, parent=None))
        names = self._bare_names()
        self._call(client.batch_put_from, names)
        loads = await interleave_async(
            partial(self._load, linker),
            partial(self._get, client, names),
            num_rounds=num_rounds,
        )
        client.remove_by_regex(".*", True)
        offloads = await interleave_async(
            partial(self._offload, linker, client),
            partial(self._put, client),
            num_rounds=num_rounds,
        )
        await linker.aclose()
        for what, times in (
            (f"load {self.name} from Mooncake", loads),
            (f"offload {self.name} to Mooncake", offloads),
        ):
            ours, baseline = map(self.mib_per_s, times)
            yield Row(
                name=f"{what}, {kind}",
                ours=ours,
                unit="MiB/s",
                baseline=baseline,
                against="the bare client",
                bound=bound,
                at_least=True,
            )

    def _plan(self, kind: Callable[..., Any], **arguments: Any) -> Any:
        hashes = [key.hash for key in self.keys]
        piece = Moved(0, 0, array("i", range(self.num_pages)), hashes)
        return kind(1, 0, self.num_pages, (piece,), **arguments)

    async def _load(self, linker: MooncakeLinker) -> float:
        plan = self._plan(LoadPlan)
        with (watch := Stopwatch()):
            num_good = await linker.load(plan, lambda layer: None)
        assert num_good == self.num_pages
        return watch.seconds

    async def _offload(self, linker: MooncakeLinker, client: Any) -> float:
        self.keys = self.new_keys(self.num_pages)
        plan = self._plan(OffloadPlan, parent=None)
        with (watch := Stopwatch()):
            outcome = await linker.offload(plan)
        assert outcome is Outcome.STORED
        client.remove_by_regex(".*", True)
        return watch.seconds

    async def _get(self, client: Any, names: Sequence[str]) -> float:
        with (watch := Stopwatch()):
            sizes = self._call(client.batch_get_into, names)
        assert sizes == self._table.num_bytes * self.num_pages
        return watch.seconds

    async def _put(self, client: Any) -> float:
        names = self._bare_names()
        with (watch := Stopwatch()):
            codes = self._call(client.batch_put_from, names)
        assert codes == [0] * self.num_pages
        client.remove_by_regex(".*", True)
        return watch.seconds

    def _call(self, call: Callable[..., Any], names: Sequence[str]) -> Any:
        addresses = [address for [address] in self._table.addresses]
        return call(names, addresses, self._table.num_bytes * self.num_pages)

    def _bare_names(self) -> list[str]:
        return [f"bare:{os.urandom(16).hex()}" for _ in range(self.num_pages)]
