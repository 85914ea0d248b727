"""What must hold after every step of a run, whatever goes wrong in it.

* The invariants of the state, from scratch.
* A page that anyone may be given as a hit holds its own bytes.
* A page that a copy or a forward still writes is where it was when that began.
* A page that becomes free is poisoned: whoever reads it after that will notice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncache.core import Holding, LoadState, PageState, Replica, RequestState
from asyncache.testing.simulation._contents import Contents
from asyncache.testing.simulation._copies import Copies, Running
from asyncache.testing.simulation._device import SimulatedDevice
from asyncache.testing.simulation._errors import LawError

Place = tuple[int, int]
"""Pool by index, and page."""


@dataclass(eq=False, slots=True)
class Writing:
    """Pages that a forward may still write, and for whom."""

    places: dict[Place, RequestState] = field(default_factory=dict)


class Laws:
    """Checks one cache, on one device.

    Args:
        replica: Its state.
        device: Where its pages are.
        copies: What moves bytes into them.
        contents: What the bytes of a page must be.
        sound: Digests of states that were found sound, shared by ranks whose states
            are compared: one of each is enough. None to check every state.
    """

    def __init__(
        self,
        replica: Replica,
        device: SimulatedDevice,
        copies: Copies,
        contents: Contents,
        sound: set[int] | None = None,
    ) -> None:
        self._sound = sound
        self._replica = replica
        self._device = device
        self._copies = copies
        self._contents = contents
        self._names = [pool.name for pool in device.layout.pools]
        self._stride = 4 * device.layout.page_tokens
        self._free = {
            (pool, page)
            for pool, name in enumerate(self._names)
            for page in range(device.num_pages[name])
        }
        self._everything = frozenset(self._free)
        self._owners: dict[Running, list[tuple[Place, LoadState]]] = {}
        self._seen = (0, 0)
        self.forwards: dict[Writing, None] = {}
        """Forwards that are under way."""

    @property
    def unwritten(self) -> set[Place]:
        """Pages that a forward has yet to write."""
        return {place for forward in self.forwards for place in forward.places}

    def check(self) -> bool:
        """Raise LawError unless all holds; return whether anything has changed.

        Raises:
            LawError: If a law is broken.
            InvariantError: If the state is not sound.
        """
        now = (self._replica.look.digest, self._copies.num_changes)
        if now == self._seen:
            return False
        self._seen = now
        self._check_soundness(now[0])
        holders = self._holders()
        self._poison_freed(holders)
        self._check_copies(holders)
        self._check_forwards(holders)
        self._check_residents()
        return True

    def _check_soundness(self, digest: int) -> None:
        if self._sound is None or digest not in self._sound:
            self._replica.look.check_invariants()
        if self._sound is not None:
            self._sound.add(digest)

    def _holders(self) -> dict[Place, Holding]:
        return {
            (holding.pool, page): holding
            for holding in self._replica.look.holdings()
            for page in holding.pages
        }

    def _poison_freed(self, holders: dict[Place, Holding]) -> None:
        free = set(self._everything.difference(holders))
        for pool, page in free - self._free:
            self._device.poison(self._names[pool], page)
        self._free = free

    def _check_copies(self, holders: dict[Place, Holding]) -> None:
        running = self._copies.running
        for copy in [copy for copy in self._owners if copy not in running]:
            del self._owners[copy]
        for copy in running:
            if copy not in self._owners:
                self._owners[copy] = self._begun(copy, holders)
            for place, holder in self._owners[copy]:
                now = holders.get(place)
                if now is None or now.holder is not holder:
                    name = self._names[place[0]]
                    raise LawError(
                        f"a copy still writes page {place[1]} of {name!r} of {holder},"
                        f" and it is {'free' if now is None else f'of {now.holder}'}"
                    )

    def _begun(
        self, copy: Running, holders: dict[Place, Holding]
    ) -> list[tuple[Place, LoadState]]:
        """Return which pages a copy writes, and who holds them as it begins."""
        begun = []
        for place in self._places(copy):
            holding = holders.get(place)
            # Its load may have been cut meanwhile, and holds the page in quarantine.
            if holding is None or not isinstance(holding.holder, LoadState):
                raise LawError(
                    f"a copy begins to write page {place[1]} of"
                    f" {self._names[place[0]]!r}, which is {holding or 'free'}"
                )
            begun.append((place, holding.holder))
        return begun

    def _places(self, copy: Running) -> list[Place]:
        found: dict[Place, None] = {}
        for target, _ in copy.moves:
            place = self._device.locate(target)
            if place is not None:
                found[self._names.index(place[0]), place[1]] = None
        return list(found)

    def _check_forwards(self, holders: dict[Place, Holding]) -> None:
        for forward in self.forwards:
            for place, request in forward.places.items():
                holding = holders.get(place)
                lost = holding is None or (
                    holding.state is PageState.TRANSIT
                    or (
                        isinstance(holding.holder, RequestState)
                        and holding.holder is not request
                    )
                )
                if lost:
                    raise LawError(
                        f"a forward still writes page {place[1]} of"
                        f" {self._names[place[0]]!r} for {request},"
                        f" and it is {holding or 'free'}"
                    )

    def _check_residents(self) -> None:
        unwritten = self.unwritten
        for root, tokens, pool, start, pages, _ in self._replica.look.residents():
            era, name = self._contents.eras[root], self._names[pool]
            for index, page in enumerate(pages):
                end = (start + index + 1) * self._stride
                wanted = self._contents.page(era, tokens[:end], name)
                if self._device.page(name, page) != wanted and (
                    (pool, page) not in unwritten
                ):
                    raise LawError(
                        f"page {page} of {name!r} is offered as position"
                        f" {start + index} of {era}, and holds other bytes"
                    )
