"""The index of a SegmentStore against a model that keeps a list of pages."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from asyncache.core import PageHash
from asyncache.stores._segment_database import Patience, SegmentDatabase
from asyncache.stores._segment_index import SegmentIndex
from asyncache.stores._segment_room import SLOTS_PER_SEGMENT
from asyncache.stores._segment_version import Version
from tests.stores.segments import check_index, index_of

NUM_SLOTS = {1: 4, 2: 4, 3: 2}
HASHES = [PageHash(bytes([number]) * 32) for number in range(12)]
SPACES = st.sampled_from(sorted(NUM_SLOTS))
USES = st.lists(st.tuples(SPACES, st.sampled_from(HASHES)), max_size=4, unique=True)


class Model:
    """Slots by state, and pages from the one used longest ago to the last one."""

    def __init__(self) -> None:
        self.segments: dict[int, int | None] = {}
        self.free: set[int] = set()
        self.claims: dict[int, str] = {}
        self.pages: dict[tuple[int, PageHash], int] = {}
        self.alive: set[str] = set()

    def touch(self, used) -> None:
        for use in used:
            if use in self.pages:
                self.pages[use] = self.pages.pop(use)

    def claim(self, owner: str, space: int, count: int, used) -> list[int]:
        self.touch(used)
        slots = self.take(space, count)
        while len(slots) < count and self.make_room(space, count - len(slots)):
            slots += self.take(space, count - len(slots))
        self.claims |= dict.fromkeys(slots, owner)
        return slots

    def take(self, space: int, count: int) -> list[int]:
        slots = sorted(s for s in self.free if self.space_of(s) == space)[:count]
        self.free -= set(slots)
        return slots

    def make_room(self, space: int, count: int) -> bool:
        if self.give_spare(space):
            return True
        dead = {s for s, owner in self.claims.items() if owner not in self.alive}
        self.free_claims(dead)
        if any(self.space_of(slot) == space for slot in dead):
            return True
        written = {slot // SLOTS_PER_SEGMENT for slot in self.claims}
        oldest = [
            page
            for page, slot in self.pages.items()
            if page[0] == space or slot // SLOTS_PER_SEGMENT not in written
        ]
        if not oldest:
            return False
        if oldest[0][0] != space:
            self.assign(self.pages[oldest[0]] // SLOTS_PER_SEGMENT, space)
            return True
        for page in oldest[:count] if count else []:
            if page[0] != space:
                break
            self.free.add(self.pages.pop(page))
        return True

    def give_spare(self, space: int) -> bool:
        used = {slot // SLOTS_PER_SEGMENT for slot in (*self.claims, *self.page_slots)}
        nobodys = [s for s, owner in self.segments.items() if owner is None]
        empty = [
            s for s, owner in self.segments.items() if owner != space and s not in used
        ]
        for segment in (*sorted(nobodys), *sorted(empty)):
            self.assign(segment, space)
            return True
        return False

    def assign(self, segment: int, space: int) -> None:
        self.empty(segment)
        self.segments[segment] = space
        first = segment * SLOTS_PER_SEGMENT
        self.free |= set(range(first, first + NUM_SLOTS[space]))

    def empty(self, segment: int) -> None:
        self.free = {s for s in self.free if s // SLOTS_PER_SEGMENT != segment}
        for rows in (self.claims, self.pages):
            for key, value in list(rows.items()):
                slot = key if rows is self.claims else value
                if slot // SLOTS_PER_SEGMENT == segment:
                    del rows[key]

    def free_claims(self, slots) -> None:
        for slot in slots:
            del self.claims[slot]
            self.free.add(slot)

    def space_of(self, slot: int) -> int | None:
        return self.segments[slot // SLOTS_PER_SEGMENT]

    @property
    def page_slots(self) -> set[int]:
        return set(self.pages.values())


class IndexMachine(RuleBasedStateMachine):
    """Several owners claim, publish, read and die."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="asyncache-index-"))
        (self.folder / "index.db").touch()
        self.lock = (self.folder / "lock").open("w+b")
        self.model = Model()
        self.databases: dict[str, SegmentDatabase] = {}
        self.indices: dict[str, SegmentIndex] = {}
        self.num_owners = 0

    def teardown(self) -> None:
        for database in self.databases.values():
            database.close()
        self.lock.close()
        shutil.rmtree(self.folder)

    @initialize(num_segments=st.integers(1, 4), target=owners)
    def set_up(self, num_segments: int):
        first, second = self.arrive(), self.arrive()
        self.databases[first].create()
        for segment in range(num_segments):
            self.indices[first].add_segment(segment)
            self.model.segments[segment] = None
        for space, num_slots in NUM_SLOTS.items():
            assert self.indices[first].space(str(space)) is None
            assert self.indices[first].add_space(str(space), num_slots) == space
            assert self.indices[second].add_space(str(space), num_slots) == space
        return multiple(first, second)

    @rule(target=owners)
    def arrive(self) -> str:
        self.num_owners += 1
        owner = f"owner {self.num_owners}"
        version = Version(self.lock.fileno())
        database = SegmentDatabase(str(self.folder / "index.db"), version, Patience())
        self.databases[owner] = database
        self.indices[owner] = SegmentIndex(
            database, owner, self.model.alive.__contains__
        )
        self.model.alive.add(owner)
        return owner

    @rule(owner=owners, space=SPACES, count=st.integers(1, 6), used=USES)
    def claim(self, owner: str, space: int, count: int, used) -> None:
        slots = self.indices[owner].claim(space, count, used)
        expected = self.model.claim(owner, space, count, used)
        assert sorted(slots) == sorted(expected)

    @rule(
        owner=owners,
        data=st.data(),
        hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True),
        used=USES,
    )
    def publish(self, owner: str, data, hashes, used) -> None:
        model = self.model
        if not (mine := self.claims_of(owner)):
            return
        space = model.space_of(data.draw(st.sampled_from(mine)))
        slots = [slot for slot in mine if model.space_of(slot) == space]
        pages = list(zip(hashes, slots, strict=False))
        stored = self.indices[owner].publish(space, pages, used=used)
        assert stored == {page_hash for page_hash, _ in pages}
        model.touch(used)
        model.free_claims(slot for _, slot in pages)
        # The first one is the youngest.
        for page_hash, slot in reversed(pages):
            if (space, page_hash) not in model.pages:
                model.pages[space, page_hash] = slot
                model.free.discard(slot)

    @rule(owner=owners, stranger=owners, page_hash=st.sampled_from(HASHES))
    def publish_what_is_not_ours(self, owner: str, stranger: str, page_hash) -> None:
        others = [] if owner == stranger else self.claims_of(stranger)
        for slot in [*others[:1], *sorted(self.model.free)[:1]]:
            space = self.model.space_of(slot)
            assert self.indices[owner].publish(space, [(page_hash, slot)]) == set()

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        mine = self.claims_of(owner)
        self.indices[owner].release([*mine, *self.model.free])
        self.model.free_claims(mine)

    @rule(owner=owners, used=USES)
    def touch(self, owner: str, used) -> None:
        self.indices[owner].touch(used)
        self.model.touch(used)

    @rule(owner=owners, space=SPACES, hashes=st.lists(st.sampled_from(HASHES)))
    def remove(self, owner: str, space: int, hashes) -> None:
        found = self.indices[owner].find(space, hashes)
        expected = {h for h in hashes if (space, h) in self.model.pages}
        assert set(found) == expected
        self.indices[owner].remove(found.values())
        for page_hash in found:
            self.model.free.add(self.model.pages.pop((space, page_hash)))
        # What is not in its place any more is not removed again.
        self.indices[owner].remove(found.values())

    @precondition(lambda self: len(self.model.alive) > 1)
    @rule(owner=consumes(owners), is_killed=st.booleans(), used=USES)
    def go(self, owner: str, is_killed: bool, used) -> None:
        if len(self.model.alive) == 1:
            return
        if not is_killed:
            self.indices[owner].leave(used)
            self.model.touch(used)
            self.model.free_claims(self.claims_of(owner))
        self.model.alive.remove(owner)
        self.databases.pop(owner).close()

    @precondition(lambda self: len(self.model.segments) > 1)
    @rule(owner=owners, data=st.data())
    def lose_a_segment(self, owner: str, data) -> None:
        segment = data.draw(st.sampled_from(sorted(self.model.segments)))
        self.indices[owner].drop_segment(segment)
        self.model.empty(segment)
        del self.model.segments[segment]

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        if not self.model.segments:
            return
        model = self.model
        with index_of(self.folder) as index:
            check_index(index)
            pages = "SELECT space, hash, slot FROM page ORDER BY seq"
            assert index.execute(pages).fetchall() == [
                (*page, slot) for page, slot in model.pages.items()
            ]
            claims = index.execute("SELECT slot, owner FROM claim")
            assert dict(claims.fetchall()) == model.claims
            free = index.execute("SELECT slot FROM free")
            assert {slot for (slot,) in free.fetchall()} == model.free
            segments = index.execute("SELECT id, space FROM segment")
            assert dict(segments.fetchall()) == model.segments

    def claims_of(self, owner: str) -> list[int]:
        return sorted(s for s, name in self.model.claims.items() if name == owner)


TestIndex = IndexMachine.TestCase
