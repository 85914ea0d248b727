"""A small recurrent model with attention and a window, served from the cache.

What it answers depends on every token so far through each of its pools, and is compared
with what it answers without a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncache.core import (
    AbortedError,
    AttentionPool,
    ClosedError,
    DeviceError,
    KVLayout,
    OrderError,
    OutOfPagesError,
    PoolStatistics,
    StatePool,
    WindowPool,
)
from asyncache.devices import CpuDevice
from asyncache.engine import BlockingCache, KVCache
from asyncache.stores import FileStore, MemoryStore
from asyncache.testing import GateStore

if TYPE_CHECKING:
    import torch

PAGE, WINDOW = 4, 6
SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "num_parts": 1}
POOLS = (
    StatePool(name="state", num_layers=2, shape=(1, 2), dtype="float64"),
    WindowPool(name="window", window_tokens=WINDOW, dtype="float64", **SHAPE),
    AttentionPool(name="kv", dtype="float64", **SHAPE),
)
LAYOUT = KVLayout(model="hybrid", page_tokens=PAGE, pools=POOLS)
PAGES = {"kv": 32, "window": 16, "state": 6}
PRIME = 1_000_003
PROMPT = list(range(10, 10 + 4 * PAGE))


def make_device(**kwargs) -> CpuDevice:
    """Return a device in which nothing is right that nobody wrote."""
    device = CpuDevice(LAYOUT, PAGES, **kwargs)
    for pool in POOLS:
        device.tensor(pool.name)[:] = -7.0
    return device


class Model:
    """Computes tokens in place, in the pages and the slot of a request."""

    def __init__(self, cache, device: CpuDevice) -> None:
        self._cache = cache
        self._device = device

    def run(self, request, tokens, start: int, end: int, keep=()) -> float:
        """Compute tokens from ``start`` on; return the answer after the last one."""
        request.extend(end)
        answer = 0.0
        with self._cache.forward([request]):
            for position in range(start, end):
                answer = self._step(request, tokens[position], position)
                if position + 1 in keep:
                    assert request.checkpoint(position + 1)
        return answer

    def _step(self, request, token: int, position: int) -> float:
        state = self._device.tensor("state")[request.state_slot["state"]]
        if position == 0:
            state.zero_()
        state[0] = (state[0] * 31 + token + 1) % PRIME
        state[1] = (state[1] + state[0]) % PRIME
        value = float(state[1].sum())
        for pool in ("kv", "window"):
            self._at(request, pool, position).fill_(value)
        return value + self._attended(request, position)

    def _attended(self, request, position: int) -> float:
        past = sum(float(self._at(request, "kv", at)) for at in range(position))
        first = max(0, position - WINDOW)
        recent = [self._at(request, "window", at) for at in range(first, position)]
        return past + 3 * sum(map(float, recent))

    def _at(self, request, pool: str, position: int) -> torch.Tensor:
        page = request.page_table[pool][position // PAGE]
        assert page >= 0
        return self._device.tensor(pool)[page, 0, 0, position % PAGE]


def expected(tokens) -> float:
    """Return what the model answers, without a cache."""
    first = second = 0
    values: list[int] = []
    for token in tokens:
        first = (first * 31 + token + 1) % PRIME
        second = (second + first) % PRIME
        values.append(2 * second)
    past, recent = values[:-1], values[-1 - WINDOW : -1]
    return float(values[-1] + sum(past) + 3 * sum(recent))


async def serve(cache, device, tokens, keep=()) -> tuple[int, float]:
    """Restore, compute and commit; return the tokens of the hit and the answer."""
    with cache.request(tokens) as request:
        hit = await (await request.restore()).wait()
        model, num_tokens = Model(cache, device), len(tokens)
        answer = model.run(request, tokens, hit.num_tokens, num_tokens, keep)
        request.commit(num_tokens)
        return hit.num_tokens, answer


def counts(cache, pool: str = "state") -> PoolStatistics:
    return cache.statistics().replica.pools[pool]


async def test_a_prompt_goes_on_from_the_state_of_another():
    device = make_device()
    async with KVCache(LAYOUT, device=device) as cache:
        assert await serve(cache, device, PROMPT, {8, 16}) == (0, expected(PROMPT))
        for tokens, hit in [
            ([*PROMPT, 5, 6], 16),
            ([*PROMPT[:11], 5, 6], 8),
            ([*PROMPT[:15], 5, 6], 8),
            ([*PROMPT[:7], 5, 6], 0),
        ]:
            assert await serve(cache, device, tokens) == (hit, expected(tokens))
        cache.check_invariants()


async def test_siblings_from_one_state_do_not_disturb_each_other():
    device = make_device()
    async with KVCache(LAYOUT, device=device) as cache:
        await serve(cache, device, PROMPT, {16})
        ends = [[*PROMPT, 5, 6], [*PROMPT, 7, 8]]
        with cache.request(ends[0]) as one, cache.request(ends[1]) as other:
            model = Model(cache, device)
            for request in (one, other):
                await (await request.restore()).wait()
            assert one.state_slot != other.state_slot
            for position in (16, 17):
                answers = [
                    model.run(request, tokens, position, position + 1)
                    for request, tokens in zip((one, other), ends, strict=True)
                ]
            assert answers == [expected(tokens) for tokens in ends]


@pytest.mark.parametrize("host_addressable", [True, False])
async def test_states_come_back_from_files(tmp_path, host_addressable):
    tokens = [*PROMPT, 5, 6]
    device = make_device(host_addressable=host_addressable)
    async with KVCache(LAYOUT, device=device, store=FileStore(tmp_path)) as cache:
        await serve(cache, device, PROMPT, {8, 12})
        await cache.drain()
    device = make_device(host_addressable=host_addressable)
    async with KVCache(LAYOUT, device=device, store=FileStore(tmp_path)) as cache:
        with cache.request([1, 2, 3]) as other:
            other.extend(3)  # takes the numbers that were used before
            assert await serve(cache, device, tokens) == (12, expected(tokens))
        assert counts(cache).tree == 1
        assert await serve(cache, device, [*PROMPT[:10], 3]) == (
            8,
            expected([*PROMPT[:10], 3]),
        )


async def test_a_state_is_stored_below_a_prefix_that_has_none():
    """The pool of states comes first, and has no page where the parent ends."""
    device, store = make_device(), MemoryStore(2**20)
    tokens = [*PROMPT, *range(2 * PAGE), 5]
    async with KVCache(LAYOUT, device=device, store=store) as cache:
        await serve(cache, device, PROMPT)
        await cache.drain()
        await serve(cache, device, tokens, {24})
        await cache.drain()
        cache.reset()
        assert cache.statistics().counters.stored_pages == 6
        assert await serve(cache, device, tokens) == (24, expected(tokens))


async def test_a_request_that_was_suspended_begins_with_its_state_again():
    device = make_device()
    async with KVCache(LAYOUT, device=device) as cache:
        tokens = [*PROMPT, 5, 6]
        model = Model(cache, device)
        with cache.request(tokens) as request:
            model.run(request, tokens, 0, 16, {16})
            request.commit(16)
            request.suspend()
            assert request.state_slot == {}
            hit = await (await request.restore()).wait()
            assert hit.num_tokens == 16
            assert model.run(request, tokens, 16, 18) == expected(tokens)


async def test_a_long_decode_gives_back_what_its_window_has_passed():
    device = make_device()
    async with KVCache(LAYOUT, device=device) as cache:
        tokens, model = PROMPT[:4], Model(cache, device)
        with cache.request(tokens, reserve_tokens=PAGE) as request:
            model.run(request, tokens, 0, 4)
            while len(tokens) < 100:
                tokens = [*tokens, len(tokens) % 9]
                request.append(tokens[-1:])
                keep = {len(tokens)} if len(tokens) == 96 else ()
                answer = model.run(request, tokens, len(tokens) - 1, len(tokens), keep)
                assert answer == expected(tokens)
                held = counts(cache, "window")
                assert held.request + held.quarantine <= 4
                if keep:
                    # Later its window would be gone in part.
                    request.commit(96)
            assert request.page_table["window"].count(-1) == 23
        assert cache.match_nowait(tokens) == 96


async def test_a_forward_waits_for_the_state_that_it_begins_with():
    store = GateStore(MemoryStore(2**20), is_open=True)
    device = make_device()
    async with KVCache(LAYOUT, device=device, store=store) as cache:
        await serve(cache, device, PROMPT, {16})
        await cache.drain()
        cache.reset()
        store.get_gate.close()
        tokens = [*PROMPT, 5]
        with cache.request(tokens) as request:
            hit = await request.restore()
            assert not hit.settled
            with pytest.raises(OrderError, match=r"await hit.wait\(\)"):
                Model(cache, device).run(request, tokens, 16, 17)
            store.get_gate.open()
            await hit.wait()
            answer = Model(cache, device).run(request, tokens, 16, 17)
            assert answer == expected(tokens)


async def test_a_checkpoint_is_a_step_of_a_forward_over_its_request():
    device = make_device()
    async with KVCache(LAYOUT, device=device) as cache:
        with cache.request(PROMPT) as request, cache.request([1]) as other:
            assert request.state_slot == {}
            request.extend(8)
            assert [*request.page_table] == ["window", "kv"]
            assert [*request.state_slot] == ["state"]
            with (
                cache.forward([other]),
                pytest.raises(OrderError, match="in a forward"),
            ):
                request.checkpoint(8)
            with cache.forward([request]):
                with pytest.raises(ValueError, match="checkpoint of 6 tokens"):
                    request.checkpoint(6)
                with pytest.raises(TypeError):
                    request.checkpoint(8.0)
                assert request.checkpoint(8)
            with pytest.raises(OrderError, match="in a forward"):
                request.checkpoint(8)
        with pytest.raises(ClosedError):
            request.checkpoint(8)


async def test_a_checkpoint_without_room_is_skipped():
    device = CpuDevice(LAYOUT, PAGES | {"state": 2})
    async with KVCache(LAYOUT, device=device) as cache:
        with cache.request(PROMPT) as request, cache.request([1]) as other:
            request.extend(8)
            other.extend(1)
            with cache.forward([request, other]):
                assert not request.checkpoint(8)
            with (
                cache.request([2]) as third,
                pytest.raises(OutOfPagesError, match="need a state slot"),
            ):
                third.extend(1)
            request.commit(8)
        assert cache.match_nowait(PROMPT) == 0


class Recorder(CpuDevice):
    """Notes the streams of its copies, and may refuse them."""

    streams: tuple = ()
    refuses = False

    def copy_pages(self, pool, sources, targets, *, stream=None):
        if self.refuses:
            raise DeviceError("refused")
        self.streams += (stream,)
        super().copy_pages(pool, sources, targets, stream=stream)


async def test_copies_go_to_the_stream_of_the_forward():
    device = Recorder(LAYOUT, PAGES)
    async with KVCache(LAYOUT, device=device) as cache:
        with cache.request(PROMPT) as request:
            request.extend(16)
            with cache.forward([request], stream=7):
                assert request.checkpoint(8, stream=8)
            request.commit(16)
        with cache.request(PROMPT) as request:
            await (await request.restore()).wait()
            with cache.forward([request], stream=9):
                assert device.streams == (8, 9)


async def test_a_copy_that_is_refused_ends_the_forward_and_its_request():
    device = Recorder(LAYOUT, PAGES)
    async with KVCache(LAYOUT, device=device) as cache:
        with cache.request(PROMPT) as request:
            request.extend(16)
            with cache.forward([request]):
                request.checkpoint(8)
            request.commit(16)
        with cache.request(PROMPT) as request:
            await (await request.restore()).wait()
            device.refuses = True
            with pytest.raises(DeviceError, match="refused"), cache.forward([request]):
                pytest.fail("the model ran")
            with pytest.raises(AbortedError):
                request.checkpoint(16)
        assert counts(cache).quarantine == 0


def test_a_loop_that_blocks_has_states_too(tmp_path):
    tokens = [*PROMPT, 5, 6]
    for hit_tokens in (0, 16):
        device = make_device()
        with BlockingCache(LAYOUT, device=device, store=FileStore(tmp_path)) as cache:
            with cache.request(tokens) as request:
                hit = request.restore()
                hit.wait()
                assert hit.num_tokens == hit_tokens
                model = Model(cache, device)
                answer = model.run(request, tokens, hit_tokens, 18, {16} - {hit_tokens})
                assert answer == expected(tokens)
                request.commit(18)
            cache.drain()
