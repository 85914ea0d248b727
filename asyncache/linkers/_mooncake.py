"""A Mooncake Store and a device, linked: no byte goes through memory in between.

Mooncake's calls block and cannot be cancelled. Those that touch pages run on a thread a
direction, a batch a call: more threads make it slower, because each that waits polls.
"""

from __future__ import annotations

import math
import re
import time

from asyncache.core import LoadPlan, LookupPlan, OffloadPlan, StoreError
from asyncache.devices import Device
from asyncache.linkers._abc import Landed, Linker, Outcome
from asyncache.linkers._asks import Asks
from asyncache.linkers._batches import Batch, Batches
from asyncache.linkers._mooncake_client import (
    FAILED_TRANSFER,
    INVALID,
    NO_ROOM,
    Client,
    MooncakeSetup,
)
from asyncache.linkers._mooncake_link import Link
from asyncache.linkers._mooncake_objects import Packer
from asyncache.threads import Stop, Workers

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_S = 3600.0
# Memory may have to be pinned.
_OPEN_S = 60.0
# A client that nothing keeps needs one second to close.
_CLOSE_S = 2.0


class MooncakeLinker(Linker):
    """Links a Mooncake Store and a device.

    Mooncake reads from the pools and writes into them, in place: their memory is
    registered from the open to the close. Pages that lie in one piece, page-first, move
    about twice as fast as those of many. Objects are written once, evicted by the
    master, and found by content. One that is not what was put is removed.

    Where the host can address the device's memory, each object ends with xxh3_64
    digests that each load verifies: unless told otherwise, and at the price of a second
    transfer a page. Elsewhere there is no checksum, and a load vouches for an object's
    size only. Pages with and without are different objects. Memory of a GPU needs
    Mooncake's CUDA build; this linker has never run with a real one.

    A master or a node that is down means misses, short loads and failed offloads, and
    both are used again when they are back. A call to a master that hangs ends after the
    30 s that Mooncake gives it; one to a hung node after those that the environment
    variable MC_TCP_STATUS_TIMEOUT_SEC gives it, which is the process's to set. Until
    then the pages of that load or offload are not still. No lookup waits for it.

    Mooncake knows no passwords, and its clients listen on all interfaces, whatever
    their hostname: for networks that are trusted only.

    Needs Mooncake, ``pip install 'asyncache[mooncake]'``, and the system's libibverbs,
    on Debian and Ubuntu ``apt-get install libibverbs1``. The constructor does no I/O.

    Args:
        source: What a client of Mooncake is set up with, which the linker makes and
            closes; or a ``MooncakeDistributedStore`` that is set up, which stays the
            caller's, and open until :meth:`aclose` has returned.
        device: Where pages are used; it stays the caller's.
        rank: Which shard of each page this rank holds. Pools that are replicated have
            none: rank 0 writes them.
        num_ranks: Shards of a page.
        prefix: What all keys begin with.
        batch_bytes: Bytes that one call to Mooncake moves, at least a page. A cancelled
            transfer ends with the batch that it is at.
        checksums: Whether objects have digests, where they can.
        lookup_s: Seconds that a lookup takes at most. While one is late, there is no
            answer to any.
        client_ttl_s: Seconds after which the master gives up a node that is gone, its
            ``--client_ttl``. For so long after a put failed there, nothing is put.

    Raises:
        ImportError: If Mooncake or libibverbs is not installed.
        DeviceError: If the device does not tell where its pages are.
        ValueError: If another argument is out of range.
    """

    def __init__(
        self,
        source: MooncakeSetup | Client,
        device: Device,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        prefix: str = "asyncache",
        batch_bytes: int = 32 * 2**20,
        checksums: bool = True,
        lookup_s: float = 1.0,
        client_ttl_s: float = 10.0,
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix must match {_PREFIX.pattern}, not {prefix!r}")
        if not 0 < lookup_s <= _MAX_S:
            raise ValueError(f"lookup_s must be in (0, {_MAX_S}], not {lookup_s}")
        if not 0 <= client_ttl_s <= _MAX_S:
            raise ValueError(
                f"client_ttl_s must be in [0, {_MAX_S}], not {client_ttl_s}"
            )
        self._batches = Batches(
            device.layout, rank=rank, num_ranks=num_ranks, batch_bytes=batch_bytes
        )
        self.num_layers = self._batches.num_layers
        self._incoming, self._outgoing = (
            Packer(device, self._batches, prefix, checksums=checksums) for _ in range(2)
        )
        tails = [*self._incoming.memory, *self._outgoing.memory]
        self._link = Link(source, [*device.spans(), *tails])
        self._client_ttl_s = client_ttl_s
        self._put_at = 0.0
        self._lookup_s = lookup_s
        self._asks = Asks("asyncache-mooncake-ask")
        self._loads = Workers(1, "asyncache-mooncake-load", owner="linker")
        self._offloads = Workers(1, "asyncache-mooncake-offload", owner="linker")

    async def open(self) -> None:
        """Set a client up, and register the pools. The master may come up later.

        Raises:
            StoreError: If the master is there and the client cannot be set up, or
                Mooncake does not take the memory of the pools.
            ClosedError: If the linker was closed: make another one.
        """
        await self._asks.ask(self._link.reach, timeout_s=_OPEN_S)

    async def lookup(self, plan: LookupPlan) -> list[list[bool]]:
        asked = self._batches.asked(plan)
        names = self._outgoing.names(asked)

        def look() -> list[int]:
            client = self._link.reach()
            return [] if client is None else client.batch_is_exist(names)

        found: list[int] | None = None
        if names:
            found = await self._asks.ask(look, timeout_s=self._lookup_s)
        codes = found or [0] * len(names)
        return self._batches.answers(plan, [code == 1 for code in codes])

    async def load(self, plan: LoadPlan, landed: Landed) -> int:
        good = plan.start

        def fill(_: None, stop: Stop) -> None:
            nonlocal good
            client = self._link.client
            if client is not None:
                good = self._fill(client, plan, stop)

        await self._loads.run(fill, [None])
        if good == plan.end:
            landed(self.num_layers - 1)
        return good - plan.start

    async def offload(self, plan: OffloadPlan) -> Outcome:
        outcome = Outcome.FAILED

        def store(_: None, stop: Stop) -> None:
            nonlocal outcome
            client = self._link.client
            if client is not None and time.monotonic() >= self._put_at:
                outcome = self._store(client, plan, stop)

        await self._offloads.run(store, [None])
        return outcome

    async def aclose(self) -> None:
        """Let go of the pools, once nothing touches them any more.

        A lookup that is late is not waited for, where the client is the linker's: the
        thread that it is on lets go of client and pools afterwards, and keeps their
        memory until then. The client of a caller is not used any more on return:
        Mooncake crashes if one is used that was closed.
        """
        try:
            await self._loads.aclose()
        finally:
            try:
                await self._offloads.aclose()
            finally:
                timeout_s = _CLOSE_S if self._link.is_ours else math.inf
                await self._asks.aclose(self._let_go, timeout_s=timeout_s)

    def _let_go(self) -> None:
        # Cancelled, the close did not wait for these; what they move in is registered.
        self._loads.executor.shutdown()
        self._offloads.executor.shutdown()
        self._link.close()

    # On the threads that move pages.

    def _fill(self, client: Client, plan: LoadPlan, stop: Stop) -> int:
        """Return the position up to which all pages are good."""
        good = plan.end
        for batch in self._batches.to_read(plan):
            if batch.start < good:
                num_good = 0 if stop.is_set() else self._get(client, batch)
                if num_good < len(batch.pages):
                    good = min(good, batch.start + num_good)
        return good

    def _get(self, client: Client, batch: Batch) -> int:
        """Fill a batch; return how many of its leading pages are good."""
        objects = self._incoming.pack(batch)
        size = self._incoming.num_bytes(batch.space)
        codes = client.batch_get_into_multi_buffers(*objects)
        bad = (place for place, code in enumerate(codes) if code != size)
        num_read = next(bad, len(codes))
        num_good = self._incoming.num_good(batch, num_read)
        if num_good < num_read:
            client.remove(objects.names[num_good], True)
        elif num_read < len(batch.pages):
            _judge(client, objects.names[num_read], codes[num_read], size)
        return num_good

    def _store(self, client: Client, plan: OffloadPlan, stop: Stop) -> Outcome:
        parent = self._batches.parent(plan)
        if parent is not None:
            codes = client.batch_is_exist(self._outgoing.names([parent]))
            if codes != [1]:
                return Outcome.PARENT_MISSING if codes == [0] else Outcome.FAILED
        for batch in self._batches.to_write(plan):
            outcome = Outcome.FAILED if stop.is_set() else self._put(client, batch)
            if outcome is not Outcome.STORED:
                return outcome
        return Outcome.STORED

    def _put(self, client: Client, batch: Batch) -> Outcome:
        objects = self._outgoing.pack(batch)
        self._outgoing.seal(batch)
        codes = client.batch_put_from_multi_buffers(*objects)
        if codes == [0] * len(batch.pages):
            return Outcome.STORED
        if INVALID in codes:
            raise StoreError(f"Mooncake refuses to store pages of {batch.space.name}")
        if FAILED_TRANSFER in codes:
            self._put_at = time.monotonic() + self._client_ttl_s
            return Outcome.FAILED
        return Outcome.REJECTED if NO_ROOM in codes else Outcome.FAILED


def _judge(client: Client, name: str, code: int, size: int) -> None:
    """Remove an object that could not be read because it has another size.

    Raises:
        StoreError: If it has not, and was refused for another reason than its node.
    """
    if code not in (INVALID, FAILED_TRANSFER) and code < 0:
        return
    found = client.get_size(name)
    if found >= 0 and found != size:
        client.remove(name, True)
    elif code == INVALID:
        raise StoreError(f"Mooncake refuses to read {name}: code {code}")
