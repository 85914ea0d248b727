"""The pages of one space, in slots. Blocking, for one thread.

A slot may be given to another page at any moment, by any process, while it is read
here. So what does not fit what was asked for is looked up once more: if the index still
says the same, the page is corrupt, else it is gone.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from asyncache.core import PageHash, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame
from asyncache.stores._segment_files import SegmentFiles, Slots
from asyncache.stores._segment_index import SegmentIndex
from asyncache.threads import Stop

# Slots that are claimed at once: a transaction costs about as much as a small page.
_MOST_CLAIMED = 64
# Of a store, so that a small one is not claimed whole.
_CLAIMED_SHARE = 64

Job = Sequence[tuple[int, PageHash, PageBuffers]]
"""Pages with their places in a batch."""


class Stock:
    """What the threads of one store have in common: claimed slots, and pages used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: defaultdict[int, list[int]] = defaultdict(list)
        self._used: defaultdict[int, dict[PageHash, None]] = defaultdict(dict)

    def take(self, space: int, count: int) -> list[int]:
        """Return up to so many claimed slots."""
        with self._lock:
            slots = self._slots[space]
            taken, slots[:] = slots[:count], slots[count:]
            return taken

    def give(self, space: int, slots: Sequence[int]) -> None:
        """Keep claimed slots for later."""
        with self._lock:
            self._slots[space] += slots

    def note_used(self, space: int, hashes: Sequence[PageHash]) -> None:
        """Remember pages that were read, the last one last."""
        with self._lock:
            used = self._used[space]
            for page_hash in hashes:
                used.pop(page_hash, None)
                used[page_hash] = None

    def take_used(self, space: int) -> list[PageHash]:
        """Return the pages that were read since this was last asked."""
        with self._lock:
            return list(self._used.pop(space, ()))

    def drain(self) -> list[tuple[int, list[int], list[PageHash]]]:
        """Return all slots and all pages used, by space."""
        with self._lock:
            spaces = sorted({*self._slots, *self._used})
            left = [(s, self._slots[s], list(self._used[s])) for s in spaces]
            self._slots.clear()
            self._used.clear()
            return left


class SlotPages:
    """The pages of one space.

    Args:
        files: The segments.
        index: This thread's.
        space: What the pages are.
        stock: Shared by all threads of the store.
        digests: Whether to write digests of the slices, and to read only pages with
            them.
        durable: Whether a page reaches the disk before it is told of.
        direct: Whether the files are open for direct I/O.
    """

    def __init__(
        self,
        files: SegmentFiles,
        index: SegmentIndex,
        space: PageSpace,
        stock: Stock,
        *,
        digests: bool,
        durable: bool,
        direct: bool,
    ) -> None:
        self._files = files
        self._index = index
        self._stock = stock
        self._frame = Frame(space)
        self._slots = Slots(files, self._frame, direct=direct)
        self._digests = digests
        self._durable = durable
        self._num_slots = files.segment_bytes // self._slots.num_bytes
        self._space = index.space(space.name, self._num_slots) if self._fits else -1

    @property
    def _fits(self) -> bool:
        """Whether a segment holds a page."""
        return self._num_slots > 0

    def find(self, hashes: Sequence[PageHash]) -> dict[PageHash, int]:
        """Return the slots of those that are stored."""
        return self._index.find(self._space, hashes) if self._fits else {}

    def read(
        self, job: Job, layers: range | None, statuses: list[Status], stop: Stop
    ) -> None:
        """Fill buffers, and say of each page what came of it."""
        wanted = range(self._frame.num_layers) if layers is None else layers
        found = self.find([page_hash for _, page_hash, _ in job])
        doubts: list[tuple[int, PageHash]] = []
        for place, page_hash, buffers in job:
            if stop.is_set():
                return
            slot = found.get(page_hash)
            if slot is None:
                statuses[place] = Status.MISS
                continue
            statuses[place] = self._read_slot(slot, page_hash, wanted, buffers)
            if statuses[place] is Status.CORRUPT or not self._digests:
                doubts.append((place, page_hash))
        if doubts:
            self._look_again(doubts, found, statuses)
        hits = [h for place, h, _ in job if statuses[place] is Status.HIT]
        self._stock.note_used(self._space, hits)

    def write(self, job: Job, statuses: list[Status], stop: Stop) -> None:
        """Store pages that are not there, and say of each what came of it."""
        if not self._fits:
            for place, _, _ in job:
                statuses[place] = Status.REJECTED
            return
        there = self.find([page_hash for _, page_hash, _ in job])
        self._stock.note_used(self._space, list(there))
        outcomes = dict.fromkeys(there, Status.HIT)
        missing = {h: buffers for _, h, buffers in job if h not in there}
        outcomes.update(self._store(missing, stop))
        for place, page_hash, _ in job:
            statuses[place] = outcomes.get(page_hash, Status.UNAVAILABLE)

    def _store(
        self, missing: dict[PageHash, PageBuffers], stop: Stop
    ) -> dict[PageHash, Status]:
        """Write pages into claimed slots, and tell of those that are whole."""
        slots = self._claim(len(missing))
        written: list[tuple[PageHash, int]] = []
        outcomes: dict[PageHash, Status] = {}
        try:
            for page_hash, buffers in missing.items():
                if stop.is_set():
                    break
                if not slots:
                    outcomes[page_hash] = Status.REJECTED
                elif self._write_slot(slots[-1], page_hash, buffers):
                    written.append((page_hash, slots.pop()))
            if self._durable:
                self._files.sync({self._slots.segment(slot) for _, slot in written})
            self._publish(written)
        except BaseException:
            slots += [slot for _, slot in written]
            raise
        finally:
            self._stock.give(self._space, slots)
        return outcomes | {page_hash: Status.HIT for page_hash, _ in written}

    def remove(self, hashes: Sequence[PageHash]) -> None:
        """Forget pages."""
        if found := self.find(hashes):
            self._index.remove(self._space, list(found.items()))

    def _read_slot(
        self, slot: int, page_hash: PageHash, layers: range, buffers: PageBuffers
    ) -> Status:
        try:
            is_there = self._slots.read(slot, layers, buffers)
        except OSError:
            return Status.UNAVAILABLE
        head, frame = self._slots.head, self._frame
        if not is_there or not frame.is_head_of(page_hash, head):
            return Status.CORRUPT
        if not self._digests:
            return Status.HIT
        if not frame.has_digests(head):
            return Status.MISS  # of no use here; one with digests may take its place
        if not frame.are_slices_of(head, layers, buffers):
            return Status.CORRUPT
        return Status.HIT

    def _look_again(
        self,
        doubts: Sequence[tuple[int, PageHash]],
        found: dict[PageHash, int],
        statuses: list[Status],
    ) -> None:
        now = self.find([page_hash for _, page_hash in doubts])
        corrupt: dict[PageHash, int] = {}
        for place, page_hash in doubts:
            if now.get(page_hash) != found[page_hash]:
                statuses[place] = Status.MISS
            elif statuses[place] is Status.CORRUPT:
                corrupt[page_hash] = found[page_hash]
        if corrupt:
            self._index.remove(self._space, list(corrupt.items()))

    def _claim(self, count: int) -> list[int]:
        slots = self._stock.take(self._space, count)
        if len(slots) < count:
            most = self._num_slots * self._files.num_segments // _CLAIMED_SHARE
            short = count - len(slots)
            slots += self._index.claim(
                self._space, max(short, min(most, _MOST_CLAIMED))
            )
        self._stock.give(self._space, slots[count:])
        return slots[:count]

    def _write_slot(self, slot: int, page_hash: PageHash, buffers: PageBuffers) -> bool:
        digests = self._frame.digests(buffers) if self._digests else None
        try:
            self._slots.write(slot, buffers, self._frame.head(page_hash, digests))
        except OSError:
            return False
        return True

    def _publish(self, written: Sequence[tuple[PageHash, int]]) -> None:
        used = self._stock.take_used(self._space)
        if written or used:
            self._index.publish(self._space, written, used)
