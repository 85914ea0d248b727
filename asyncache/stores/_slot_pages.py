"""The pages of one space, in slots. Blocking, for one thread.

A slot may be given to another page at any moment, by any process, while it is read
here. So what does not fit what was asked for is looked up once more: if the index still
says the same, the page is corrupt, else it is gone. Without digests everything is.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter

from asyncache.core import HASH_BYTES, PageHash, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._frame import Frame
from asyncache.stores._segment_files import SegmentFiles, Slots, segment_of
from asyncache.stores._segment_index import Place, SegmentIndex
from asyncache.stores._segment_quotas import SegmentQuotas
from asyncache.stores._stock import Stock, Written
from asyncache.threads import Stop

# Of a store, so that a small one is not claimed whole.
_CLAIMED_SHARE = 8

# Some 10 MB of them, a thread.
_MOST_PLACES = 1 << 16

Item = tuple[int, PageHash, PageBuffers]
"""A page with its place in a batch."""
Job = Sequence[Item]
Outcome = tuple[int, PageHash, Status]


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
        *,
        stock: Stock,
        quotas: SegmentQuotas,
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
        self._seen: int | None = None
        self._places: dict[PageHash, Place] = {}
        """Where some pages are, for as long as the index is as it was seen."""

    def find(self, hashes: Sequence[PageHash]) -> dict[PageHash, Place]:
        """Return the places of those that are stored.

        Raises:
            ValueError: If one is no hash: in the index it would shift those beside it.
        """
        for page_hash in hashes:
            if len(page_hash) != HASH_BYTES:
                raise ValueError(
                    f"a page hash has {HASH_BYTES} bytes, not {len(page_hash)}"
                )
        now = self._index.version
        if now is None or now != self._seen or len(self._places) > _MOST_PLACES:
            self._places, self._seen = {}, now
        if self._known is None:
            self._known = self._index.space(self._name)
        if self._known is None:
            return {}
        places = self._places
        if strangers := [h for h in hashes if h not in places]:
            places.update(self._index.find(self._known, strangers))
        return {h: places[h] for h in hashes if h in places}

    def read(
        self, job: Job, layers: range | None, statuses: list[Status], stop: Stop
    ) -> None:
        """Fill buffers, and say of each page what came of it."""
        wanted = range(self._frame.num_layers) if layers is None else layers
        found = self.find([page_hash for _, page_hash, _ in job])
        outcomes = [(place, h, Status.MISS) for place, h, _ in job if h not in found]
        there = [(found[h].slot, item) for item in job if (h := item[1]) in found]
        for slot, run in self._runs(there, wanted):
            if stop.is_set():
                break
            outcomes += self._read_run(slot, run, wanted)
        self._judge(sorted(outcomes, key=itemgetter(0)), found, statuses)
        self._tell_if_late()

    def write(
        self,
        job: Job,
        statuses: list[Status],
        stop: Stop,
        *,
        tell: Callable[[], bool],
    ) -> list[Written]:
        """Put pages that are not there into slots; :meth:`publish` tells of them.

        Says of the others what came of them. Where slots are short, ``tell`` publishes
        what others wrote, so that it may give way; it returns whether there was any.
        """
        if not self._slots.per_segment:
            for place, _, _ in job:
                statuses[place] = Status.REJECTED
            return []
        outcomes: dict[PageHash, Status] = {}
        slots: list[int] = []
        written: dict[PageHash, int] = {}
        try:
            # Jobs of one put begin together: each that asks makes all of them slower,
            # and the first one claims for all.
            with self._index.alone():
                missing = self._missing(job, outcomes)
                self._claim(slots, len(missing))
            if len(slots) < len(missing) and tell():
                with self._index.alone():
                    missing = self._missing(job, outcomes)
                    self._claim_more(slots, len(missing))
            for page_hash in list(missing)[len(slots) :]:
                outcomes[page_hash] = Status.REJECTED
            written = self._fill(slots, missing, stop)
        finally:
            if slots:
                self._stock.give(
                    self._space, sorted(set(slots) - set(written.values()))
                )
            for place, page_hash, _ in job:
                statuses[place] = outcomes.get(page_hash, Status.UNAVAILABLE)
        places = {page_hash: place for place, page_hash, _ in job}
        return [Written(h, self._space, s, places[h]) for h, s in written.items()]

    def publish(self, written: Sequence[Written], statuses: list[Status]) -> None:
        """Tell of pages that are in their slots, and say what came of that."""
        pages = {one.hash: one.slot for one in written}
        try:
            if self._durable:
                self._files.sync(set(map(segment_of, pages.values())))
            with self._stock.telling_uses() as used:
                stored = self._index.publish(self._space, list(pages.items()), used)
        except BaseException:
            self._stock.keep(written)
            raise
        for one in written:
            if one.hash in stored:
                statuses[one.place] = Status.HIT
        self._quotas.enforce(stored)

    def settle(self, stop: Stop) -> None:
        """Give back what nobody will need, once pages were written."""
        self._give_back(self._stock.take_surplus(is_over=stop.is_set()))
        self._tell_if_late()

    def remove(self, hashes: Sequence[PageHash]) -> None:
        """Forget pages."""
        if found := self.find(hashes):
            self._index.remove(found.values())

    @property
    def _space(self) -> int:
        if self._known is None:
            self._known = self._index.add_space(self._name, self._slots.per_segment)
        return self._known

    # Reading.

    def _runs(
        self, there: Iterable[tuple[int, Item]], layers: range
    ) -> Iterator[tuple[int, Job]]:
        """Yield pages that lie side by side, and the first one's slot."""
        is_whole = len(layers) == self._frame.num_layers
        num_most = self._slots.num_together if is_whole else 1
        first, run = 0, list[Item]()
        for slot, item in sorted(there, key=itemgetter(0)):
            if run and (slot != first + len(run) or len(run) == num_most):
                yield first, run
                run = []
            first = first if run else slot
            run.append(item)
        if run:
            yield first, run

    def _read_run(self, slot: int, run: Job, layers: range) -> list[Outcome]:
        heads: list[bytearray] = []
        if len(run) > 1:
            with suppress(OSError):  # one by one then, to tell which of them it is
                heads = self._slots.read_run(slot, [buffers for _, _, buffers in run])
        if heads:
            return [
                (place, page_hash, self._verdict(page_hash, head, layers, buffers))
                for (place, page_hash, buffers), head in zip(run, heads, strict=True)
            ]
        return [
            (place, page_hash, self._read_slot(slot + at, page_hash, layers, buffers))
            for at, (place, page_hash, buffers) in enumerate(run)
        ]

    def _read_slot(
        self, slot: int, page_hash: PageHash, layers: range, buffers: PageBuffers
    ) -> Status:
        try:
            if self._slots.read(slot, layers, buffers):
                return self._verdict(page_hash, self._slots.head, layers, buffers)
        except OSError as error:
            if error.errno != errno.ENOENT:
                return Status.UNAVAILABLE
        return Status.CORRUPT

    def _verdict(
        self, page_hash: PageHash, head: bytearray, layers: range, buffers: PageBuffers
    ) -> Status:
        frame = self._frame
        if not frame.is_head_of(page_hash, head):
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
        outcomes: Sequence[Outcome],
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
            self._stock.note_used(self._space, hits[::-1])
        if useless:
            self._index.remove(useless.values())

    def _find_again(
        self, doubts: Sequence[PageHash], found: dict[PageHash, Place]
    ) -> dict[PageHash, Place]:
        """Return where pages are now."""
        is_as_seen = self._seen is not None and self._seen == self._index.version
        return found if is_as_seen else self.find(doubts)

    def _is_certain(self, status: Status) -> bool:
        """Whether a status holds, whatever became of the slot since the first look."""
        if status is Status.HIT:
            return self._digests
        return status is Status.UNAVAILABLE

    # Writing.

    def _missing(
        self, job: Job, outcomes: dict[PageHash, Status]
    ) -> dict[PageHash, PageBuffers]:
        """Return the pages to write, and say anew what came of the others."""
        there = self.find([page_hash for _, page_hash, _ in job])
        outcomes.clear()  # one that was there may have given way since
        outcomes.update(dict.fromkeys(there, Status.HIT))
        if there:
            self._stock.note_used(self._space, list(there)[::-1])
        missing = {h: buffers for _, h, buffers in job if h not in there}
        for page_hash in list(missing):
            if not self._quotas.allows(page_hash, self._slots.num_bytes):
                outcomes[page_hash] = Status.REJECTED
                del missing[page_hash]
        return missing

    def _fill(
        self, slots: Sequence[int], missing: dict[PageHash, PageBuffers], stop: Stop
    ) -> dict[PageHash, int]:
        """Write pages into slots; return where those are that are whole."""
        items = [(0, page_hash, buffers) for page_hash, buffers in missing.items()]
        # Neighbours lie side by side.
        there = zip(sorted(slots), items, strict=False)
        written: dict[PageHash, int] = {}
        for slot, run in self._runs(there, range(self._frame.num_layers)):
            stop.pause()
            if stop.is_set():
                break
            written.update(self._write_run(slot, run))
        return written

    def _claim(self, slots: list[int], count: int) -> None:
        """Add slots up to a number, as far as there are any."""
        self._claim_more(slots, count)
        # What we hold for other spaces may be what is in the way.
        if len(slots) < count and (others := self._stock.take_surplus(is_over=True)):
            self._give_back(others)
            self._claim_more(slots, count)

    def _claim_more(self, slots: list[int], count: int) -> None:
        if len(slots) >= count:
            return
        with self._index.alone():
            space = self._space
            # Another job may have claimed for this one while it waited.
            slots += self._stock.take(space, count - len(slots))
            if short := count - len(slots):
                most = self._slots.per_segment * self._files.num_segments
                wanted = self._stock.num_to_claim(short, most // _CLAIMED_SHARE)
                with self._stock.telling_uses() as used:
                    found = self._index.claim(space, wanted, used)
                slots += found[:short]
                self._stock.give(space, found[short:])

    def _write_run(self, slot: int, run: Job) -> dict[PageHash, int]:
        """Write pages side by side; return where those are that could be written."""
        frame = self._frame
        heads = [
            frame.head(page_hash, frame.digests(buffers) if self._digests else None)
            for _, page_hash, buffers in run
        ]
        if len(run) > 1:
            with suppress(OSError):  # one by one then, to tell which of them it is
                pages = [buffers for _, _, buffers in run]
                self._slots.write_run(slot, pages, heads)
                return {h: slot + at for at, (_, h, _) in enumerate(run)}
        written = {}
        for at, (_, page_hash, buffers) in enumerate(run):
            with suppress(OSError):
                self._slots.write(slot + at, buffers, heads[at])
                written[page_hash] = slot + at
        return written

    def _give_back(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        try:
            self._index.release(slots)
        except BaseException:
            self._stock.put_back_surplus(slots)
            raise

    # Uses.

    def _tell_if_late(self) -> None:
        used = self._stock.take_used_if_late()
        if used:
            try:
                self._index.touch(used)
            except (sqlite3.Error, OSError):
                self._stock.put_back_used(used)
