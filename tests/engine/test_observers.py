"""What a cache tells, and that whoever listens can hurt nobody."""

from __future__ import annotations

import pytest

from asyncache.core import Fact, FactKind, PagesCached, PagesDropped, root_hash
from asyncache.engine import Statistics
from asyncache.stores import MemoryStore
from asyncache.testing import Fault, FaultyStore
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    gate_store,
    keys,
    memory_store,
    prompt,
    scene,
)

TOKENS = prompt(3)


async def test_events_tell_what_became_of_pages():
    store = MemoryStore(2**20)
    async with scene(store, num_pages=4) as view:
        await view.serve(TOKENS)
        await view.cache.drain()
        await view.serve(prompt(3, seed=1))
        await view.cache.drain()
        kinds = [event.kind for event in view.log.of(Fact)]
        published, stored, evicted = (
            FactKind.PUBLISHED,
            FactKind.STORED,
            FactKind.EVICTED,
        )
        assert kinds == [published, stored, evicted, published, stored]
        told = next(e for e in view.log.of(Fact) if e.kind is stored)
        assert list(told.hashes) == [key.hash for key in keys(TOKENS)]
        assert await view.serve(TOKENS) == 3 * PAGE
        landed = [e.num_pages for e in view.log.of(Fact) if e.kind is FactKind.LANDED]
        assert landed == [3]


class Account:
    """Keeps account of what is resident, from events alone, as a router does."""

    def __init__(self) -> None:
        self.children: dict[bytes, set[bytes]] = {}

    def on_event(self, event) -> None:
        match event:
            case PagesCached(pool="kv", hashes=hashes, parent=parent):
                for page in hashes:
                    self.children.setdefault(parent, set()).add(page)
                    parent = page
            case PagesDropped(pool="kv", hashes=hashes):
                gone = set(hashes)
                for siblings in self.children.values():
                    siblings.difference_update(gone)
            case Fact(kind=FactKind.RESET):
                self.children.clear()

    def match(self, tokens) -> int:
        """Return how many leading pages of a prompt are resident."""
        parent = root_hash(LAYOUT, None)
        for count, key in enumerate(keys(tokens)):
            if key.hash not in self.children.get(parent, ()):
                return count
            parent = key.hash
        return len(keys(tokens))


async def test_events_are_residency():
    account = Account()
    other = prompt(3, seed=1)
    async with scene(MemoryStore(2**20), num_pages=7, observer=account) as view:
        for tokens in (TOKENS, other, TOKENS, other[:8] + TOKENS, TOKENS):
            await view.serve(tokens)
            for known in (TOKENS, other):
                resident = view.cache.match_nowait(known) // PAGE
                assert account.match(known) == resident
            await view.cache.drain()
        view.cache.reset()
        assert account.match(TOKENS) == 0
        await view.serve(TOKENS)
        assert account.match(TOKENS) == 3


async def test_statistics_add_up_and_never_fall():
    store = FaultyStore(await memory_store(TOKENS), Fault.LOST, keys=keys(TOKENS)[2:])
    async with scene(store) as view:
        before = view.cache.statistics()
        assert isinstance(before, Statistics)
        await view.serve(TOKENS)
        await view.cache.drain()
        scope = view.cache.request(TOKENS)
        await scope.__enter__().restore()
        scope.__exit__(ValueError, None, None)
        after = view.cache.statistics().counters
        assert before.counters.restores == 0
        assert (after.restores, after.lookup_tokens) == (2, 26)
        assert (after.device_tokens, after.store_tokens) == (3 * PAGE, 3 * PAGE)
        assert (after.loaded_pages, after.loaded_bytes) == (2, 2 * 64)
        assert (after.cut_pages, after.shortened) == (1, 1)
        assert (after.published_pages, after.stored_pages) == (1, 1)
        assert after.stored_bytes == 64
        assert (after.closed, after.aborted) == (1, 1)


async def test_an_observer_that_raises_is_told_to_the_loop_and_to_nobody_else():
    class Failing:
        def on_event(self, event):
            raise ValueError("observer")

    async with scene(await memory_store(TOKENS), observer=Failing()) as view:
        assert await view.serve(TOKENS) == 3 * PAGE
        await view.serve(prompt(2, seed=1))
        await view.cache.drain()
        assert view.loop_errors
        for context in view.loop_errors:
            assert str(context["exception"]) == "observer"
        view.loop_errors.clear()


async def test_an_observer_may_call_back_into_the_cache():
    class Curious:
        """Opens, computes and ends a request within each event, to some depth."""

        def __init__(self):
            self.view = None
            self.num_events = 0

        def on_event(self, event):
            self.num_events += 1
            view, seed = self.view, 10 + self.num_events
            if view is None or self.num_events > 20:
                return
            view.cache.statistics()
            view.cache.check_invariants()
            tokens = prompt(1, seed=seed)
            with view.cache.request(tokens) as request:
                view.finish(request, tokens, 0)
            scope = view.cache.request(prompt(1))
            scope.__enter__().extend(1)
            scope.__exit__(ValueError, None, None)

    observer = Curious()
    store = await memory_store(TOKENS)
    async with scene(store, num_pages=64, observer=observer) as view:
        observer.view = view
        assert await view.serve(TOKENS) == 3 * PAGE
        await view.rest()
        assert observer.num_events > 20


async def test_an_observer_may_end_the_request_that_an_event_is_about():
    class Ending:
        def __init__(self):
            self.scope = None

        def on_event(self, event):
            kind = getattr(event, "kind", None)
            if self.scope is not None and kind is FactKind.LANDED:
                self.scope.__exit__(None, None, None)

    observer = Ending()
    async with scene(await memory_store(TOKENS), observer=observer) as view:
        scope = view.cache.request(TOKENS)
        request = scope.__enter__()
        hit = await request.restore()
        observer.scope = scope
        with pytest.raises(Exception, match="the request has ended"):
            await hit.wait()


async def test_two_caches_in_a_process_share_nothing():
    async with scene() as one, scene(num_pages=4) as two:
        await one.serve(TOKENS)
        assert two.cache.match_nowait(TOKENS) == 0
        await two.serve(TOKENS)
        assert one.cache.statistics().counters.restores == 1
        one.cache._runtime.queues._loop.set_exception_handler(None)


async def test_an_observer_is_told_after_the_requests_that_an_event_concerns():
    class Looking:
        """Keeps what the hits have come to when their load lands."""

        def __init__(self):
            self.hits, self.seen = [], []

        def on_event(self, event):
            if getattr(event, "kind", None) is FactKind.LANDED:
                self.seen += [(hit.settled, hit.num_tokens) for hit in self.hits]

    observer, store = Looking(), await gate_store(TOKENS, is_open=True)
    store.get_gate.close()
    async with scene(store, observer=observer) as view:
        with view.cache.request(TOKENS) as one, view.cache.request(TOKENS) as two:
            observer.hits = [await one.restore(), await two.restore()]
            assert not any(hit.settled for hit in observer.hits)
            store.get_gate.open()
            await observer.hits[0].wait()
    assert observer.seen == [(True, 3 * PAGE)] * 2
