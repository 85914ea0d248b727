"""The pages of one space, in slots. Blocking, for one thread.

A slot may be given to another page at any moment, by any process, while it is read
here. So what does not fit what was asked for is looked up once more: if the index still
says the same, the page is corrupt, else it is gone. Without digests everything is.
"""

from __future__ import annotations

import errno
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncache.core import PageHash, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame
from asyncache.stores._segment_batch import Written
from asyncache.stores._segment_files import SegmentFiles, Slots, segment_of
from asyncache.stores._segment_index import Place, SegmentIndex, Uses
from asyncache.stores._segment_quotas import SegmentQuotas
from asyncache.stores._stock import Stock
from asyncache.threads import Stop

# Of a store, so that a small one is not claimed whole.
_CLAIMED_SHARE = 16

Job = Sequence[tuple[int, PageHash, PageBuffers]]
"""Pages with their places in a batch."""


class SlotPages:
    """The pages of one space.

    Args:
        files: The segments.
        index: This thread's.
        space: What the pages are.
        stock: Shared by all threads of the store.
        quotas: This thread's.
        digests: Whether to write digests of the slices, and to read only pages with
            them.
        durable: Whether a page reaches the disk before it is told of.
        direct: Whether the files are open for direct I/O.
        keeps_plain: Whether pages that are not read, for they have none, stay.
    """

    def __init__(
        self,
        files: SegmentFiles,
        index: SegmentIndex,
        space: PageSpace,
        stock: Stock,
        quotas: SegmentQuotas,
        *,
        digests: bool,
        durable: bool,
        direct: bool,
        keeps_plain: bool = False,
    ) -> None:
        self._files = files
        self._index = index
        self._stock = stock
        self._quotas = quotas
        self._frame = Frame(space)
        self._slots = Slots(files, self._frame, direct=direct)
        self._digests = digests
        self._durable = durable
        self._keeps_plain = keeps_plain
        self._name = space.name
        self._known: int | None = None
        self._version = -1

    def find(self, hashes: Sequence[PageHash]) -> dict[PageHash, Place]:
        """Return the places of those that are stored."""
        if self._known is None:
            self._known = self._index.space(self._name)
        return {} if self._known is None else self._index.find(self._known, hashes)

    def read(
        self, job: Job, layers: range | None, statuses: list[Status], stop: Stop
    ) -> None:
        """Fill buffers, and say of each page what came of it."""
        wanted = range(self._frame.num_layers) if layers is None else layers
        found = self.find([page_hash for _, page_hash, _ in job])
        outcomes: list[tuple[int, PageHash, Status]] = []
        for place, page_hash, buffers in job:
            if stop.is_set():
                break
            there = found.get(page_hash)
            status = (
                Status.MISS
                if there is None
                else self._read_slot(there.slot, page_hash, wanted, buffers)
            )
            outcomes.append((place, page_hash, status))
        self._judge(outcomes, found, statuses)
        self._tell_if_late()

    def write(self, job: Job, statuses: list[Status], stop: Stop) -> list[Written]:
        """Put pages that are not there into slots; :meth:`publish` tells of them.

        Says of the others what came of them.
        """
        if not self._slots.per_segment:
            for place, _, _ in job:
                statuses[place] = Status.REJECTED
            return []
        there = self.find([page_hash for _, page_hash, _ in job])
        outcomes = dict.fromkeys(there, Status.HIT)
        if there:
            self._stock.note_used(self._space, list(there))
        missing = {h: buffers for _, h, buffers in job if h not in there}
        for page_hash in list(missing):
            if not self._quotas.allows(page_hash, self._slots.num_bytes):
                outcomes[page_hash] = Status.REJECTED
                del missing[page_hash]
        slots: dict[PageHash, int] = {}
        try:
            if missing:
                slots = self._fill(missing, outcomes, stop)
        finally:
            places: defaultdict[PageHash, list[int]] = defaultdict(list)
            for place, page_hash, _ in job:
                statuses[place] = outcomes.get(page_hash, Status.UNAVAILABLE)
                places[page_hash].append(place)
        return [Written(h, self._space, s, places[h]) for h, s in slots.items()]

    def publish(self, written: Sequence[Written], statuses: list[Status]) -> None:
        """Tell of pages that are in their slots, and say what came of that."""
        pages: dict[PageHash, int] = {}
        surplus = [
            one.slot
            for one in written
            if pages.setdefault(one.hash, one.slot) != one.slot
        ]
        try:
            if self._durable:
                self._files.sync(set(map(segment_of, pages.values())))
            with self._telling_uses() as used:
                stored = self._index.publish(
                    self._space, list(pages.items()), used=used, surplus=surplus
                )
        except BaseException:
            self._stock.keep(written)
            raise
        for one in written:
            if one.hash in stored:
                for place in one.places:
                    statuses[place] = Status.HIT
        self._quotas.enforce(stored)

    def settle(self, stop: Stop) -> None:
        """Give back what nobody will need, once pages were written."""
        self._give_back(self._stock.take_surplus(is_over=stop.is_set()))
        self._tell_if_late()

    def remove(self, hashes: Sequence[PageHash]) -> None:
        """Forget pages."""
        if found := self.find(hashes):
            self._index.remove(self._space, list(found.items()))

    @property
    def _space(self) -> int:
        if self._known is None:
            self._known = self._index.add_space(self._name, self._slots.per_segment)
        return self._known

    # Reading.

    def _read_slot(
        self, slot: int, page_hash: PageHash, layers: range, buffers: PageBuffers
    ) -> Status:
        try:
            is_there = self._slots.read(slot, layers, buffers)
        except OSError as error:
            if error.errno != errno.ENOENT:
                return Status.UNAVAILABLE
            is_there = False
        head, frame = self._slots.head, self._frame
        if not is_there or not frame.is_head_of(page_hash, head):
            return Status.CORRUPT
        if not self._digests:
            return Status.HIT
        if not frame.has_digests(head):
            return Status.MISS  # of no use here, and in the way of one with digests
        if not frame.are_slices_of(head, layers, buffers):
            return Status.CORRUPT
        return Status.HIT

    def _judge(
        self,
        outcomes: Sequence[tuple[int, PageHash, Status]],
        found: dict[PageHash, Place],
        statuses: list[Status],
    ) -> None:
        """Say what came of pages; nothing of one whose slot is in doubt before it."""
        doubts = [
            page_hash
            for _, page_hash, status in outcomes
            if page_hash in found and not self._is_certain(status)
        ]
        now = self._find_again(doubts, found) if doubts else {}
        moved = {h for h in doubts if now.get(h) != found[h]}
        useless: dict[PageHash, Place] = {}
        hits: list[PageHash] = []
        for place, page_hash, status in outcomes:
            statuses[place] = Status.MISS if page_hash in moved else status
            if statuses[place] is Status.HIT:
                hits.append(page_hash)
            elif page_hash in now and page_hash not in moved:
                if status is Status.MISS and self._keeps_plain:
                    continue
                useless[page_hash] = now[page_hash]
        if hits:
            self._stock.note_used(self._space, hits)
        if useless:
            self._index.remove(self._space, list(useless.items()))

    def _find_again(
        self, doubts: Sequence[PageHash], found: dict[PageHash, Place]
    ) -> dict[PageHash, Place]:
        """Return where pages are now."""
        # Asked before the first look, or earlier. What has not changed is as it was.
        before, self._version = self._version, self._index.version
        return found if self._version == before else self.find(doubts)

    def _is_certain(self, status: Status) -> bool:
        """Whether a status holds, whatever became of the slot since the first look."""
        if status is Status.HIT:
            return self._digests
        return status is Status.UNAVAILABLE

    # Writing.

    def _fill(
        self,
        missing: dict[PageHash, PageBuffers],
        outcomes: dict[PageHash, Status],
        stop: Stop,
    ) -> dict[PageHash, int]:
        """Write pages into claimed slots; return where those are that are whole."""
        slots = self._claim(len(missing))
        written: dict[PageHash, int] = {}
        try:
            for page_hash, buffers in missing.items():
                if stop.is_set():
                    break
                if not slots:
                    outcomes[page_hash] = Status.REJECTED
                elif self._write_slot(slots[-1], page_hash, buffers):
                    written[page_hash] = slots.pop()
        except BaseException:
            slots += written.values()
            raise
        finally:
            self._stock.give(self._space, slots)
        return written

    def _claim(self, count: int) -> list[int]:
        space = self._space
        slots = self._stock.take(space, count)
        try:
            if len(slots) < count:
                slots += self._claim_more(count - len(slots))
            # What we hold for other spaces may be what is in the way.
            if len(slots) < count and (
                others := self._stock.take_surplus(is_over=True)
            ):
                self._give_back(others)
                slots += self._claim_more(count - len(slots))
        except BaseException:
            self._stock.give(space, slots)
            raise
        slots.sort(reverse=True)  # taken from the end: neighbours lie side by side
        self._stock.give(space, slots[:-count])
        return slots[-count:]

    def _claim_more(self, short: int) -> list[int]:
        num_slots = self._slots.per_segment * self._files.num_segments
        count = self._stock.num_to_claim(short, num_slots // _CLAIMED_SHARE)
        with self._telling_uses() as used:
            return self._index.claim(self._space, count, used)

    def _write_slot(self, slot: int, page_hash: PageHash, buffers: PageBuffers) -> bool:
        digests = self._frame.digests(buffers) if self._digests else None
        try:
            self._slots.write(slot, buffers, self._frame.head(page_hash, digests))
        except OSError:
            return False
        return True

    def _give_back(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        try:
            self._index.release(slots)
        except BaseException:
            self._stock.put_back_surplus(slots)
            raise

    # Uses.

    @contextmanager
    def _telling_uses(self) -> Iterator[Uses]:
        used = self._stock.take_used()
        try:
            yield used
        except BaseException:
            self._stock.put_back_used(used)
            raise

    def _tell_if_late(self) -> None:
        used = self._stock.take_used_if_late()
        if used:
            try:
                self._index.touch(used)
            except sqlite3.Error:
                self._stock.put_back_used(used)
