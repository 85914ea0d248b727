"""A put into a SegmentStore: jobs that write parts of it, and one that tells of all.

A transaction costs about as much as a small page, so a put has one for all of its
pages: the job that ends last tells of them, or one that finds out that it should stop,
or where the last ones never began, one that nobody waits for.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from asyncache.core import PageKey, PageSpace
from asyncache.stores._abc import PageBuffers, Status
from asyncache.stores._batches import runs
from asyncache.stores._slot_pages import SlotPages
from asyncache.stores._stock import Stock, Written
from asyncache.threads import Stop, Workers


class Put:
    """A put. Any thread may call it, but for :meth:`end`.

    Args:
        keys: What is stored; none is named twice.
        sources: Its bytes.
        stock: The store's.
        pages: Returns what this thread writes pages of a space with.

    Attributes:
        statuses: What became of each page so far.
    """

    def __init__(
        self,
        keys: Sequence[PageKey],
        sources: Sequence[PageBuffers],
        stock: Stock,
        pages: Callable[[PageSpace, Stop], SlotPages],
    ) -> None:
        self._keys = keys
        self._sources = sources
        self._stock = stock
        self._pages = pages
        self._lock = threading.Lock()
        self._written: defaultdict[PageSpace, list[Written]] = defaultdict(list)
        self._num_left = len(keys)
        self.statuses = [Status.UNAVAILABLE] * len(keys)
        stock.expect(len(keys))

    def write(self, part: range, stop: Stop) -> None:
        """Write a part, and tell of all if it is the last; a job.

        Raises:
            sqlite3.Error: If the index cannot be asked or told.
            OSError: Likewise.
        """
        try:
            for run in runs(self._keys, part):
                stop.pause()
                if stop.is_set():
                    break
                self._write_run(run, stop)
        finally:
            if self._count_down(len(part)) or stop.is_set():
                stop.pause()
                self._finish(stop)

    def end(self, workers: Workers) -> None:
        """Have what is left told of, once no job will begin any more."""
        if not self._num_left:
            return
        self._count_down(self._num_left)

        def finish() -> None:
            with suppress(sqlite3.Error, OSError):
                self._finish(Stop())

        with suppress(RuntimeError):  # closed: all claims are given back then
            workers.executor.submit(finish)

    def _write_run(self, run: range, stop: Stop) -> None:
        space = self._keys[run[0]].space
        job = [(place, self._keys[place].hash, self._sources[place]) for place in run]
        pages = self._pages(space, stop)
        written = pages.write(job, self.statuses, stop, tell=lambda: self._tell(stop))
        if written:
            with self._lock:
                self._written[space] += written

    def _count_down(self, num_pages: int) -> bool:
        """Take note that pages are dealt with; return whether none is left."""
        self._stock.expect(-num_pages)
        with self._lock:
            self._num_left -= num_pages
            return not self._num_left

    def _finish(self, stop: Stop) -> None:
        self._tell(stop)
        self._pages(self._keys[0].space, stop).settle(stop)

    def _tell(self, stop: Stop) -> bool:
        """Tell of the pages that are in their slots; return whether there were any.

        Where that fails, the slots of those that nobody was told of are kept.
        """
        with self._lock:
            left, self._written = self._written, defaultdict(list)
        has_any = bool(left)
        try:
            while left:
                space, written = left.popitem()
                self._pages(space, stop).publish(written, self.statuses)
        finally:
            for written in left.values():
                self._stock.keep(written)
        return has_any
