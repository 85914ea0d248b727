"""What nobody should say: an error names value and bound, and nothing has changed."""

from __future__ import annotations

import asyncio
import math
import threading
from array import array

import numpy as np
import pytest
import torch

from asyncache.core import AttentionPool, ClosedError, KVLayout, OrderError
from asyncache.devices import CpuDevice
from asyncache.engine import KVCache, Limits, WriteThrough
from tests.engine.scene import (
    LAYOUT,
    PAGE,
    compute,
    memory_store,
    prompt,
    scene,
    unchanged,
)

TOKENS = prompt(3)

BAD_TOKENS = [
    ([], ValueError, "at least 1"),
    ((), ValueError, "at least 1"),
    (array("i"), ValueError, "at least 1"),
    (torch.empty(0, dtype=torch.int64), ValueError, "at least 1"),
    ([1, 2.0], TypeError, "float"),
    ([1, True], TypeError, "bool"),
    ([1, "2"], TypeError, "str"),
    ([[1, 2], [3, 4]], TypeError, "list"),
    ([1, None], TypeError, "NoneType"),
    ("text", TypeError, "str"),
    (17, TypeError, "int"),
    (None, TypeError, "NoneType"),
    ([1, -1], ValueError, "-1"),
    ([2**31], ValueError, str(2**31)),
    ([1, 2**70], ValueError, str(2**70)),
    (array("i", [3, -7]), ValueError, r"\[0, 2147483647\]"),
    (array("q", [2**31]), ValueError, str(2**31)),
    (array("d", [1.0]), TypeError, "format 'd'"),
    (memoryview(bytes(8)).cast("i", shape=[1, 2]), ValueError, "1 dimension"),
    (np.array([1.5]), TypeError, "format 'd'"),
    (np.array([True]), TypeError, r"format '\?'"),
    (np.array([[1, 2]]), ValueError, "1 dimension"),
    (torch.tensor([1.0]), TypeError, "float32"),
    (torch.tensor([True]), TypeError, "bool"),
    (torch.tensor([1j]), TypeError, "complex"),
    (torch.tensor([1], dtype=torch.bfloat16), TypeError, "bfloat16"),
    (torch.tensor([[1, 2]]), ValueError, "1 dimension"),
    (torch.tensor(1), ValueError, "1 dimension"),
    (torch.tensor([-1]), ValueError, "-1"),
    (torch.tensor([2**31]), ValueError, str(2**31)),
    (torch.empty(3, dtype=torch.int64, device="meta"), TypeError, "on meta"),
]
GOOD_TOKENS = [
    [1, 2, 3],
    (1, 2, 3),
    range(1, 4),
    array("i", [1, 2, 3]),
    array("q", [1, 2, 3]),
    np.array([1, 2, 3]),
    np.array([1, 9, 2, 9, 3], dtype=np.int32)[::2],
    torch.tensor([1, 2, 3]),
    torch.tensor([1, 2, 3], dtype=torch.int16),
    iter([1, 2, 3]),
]
BAD_COUNTS = [
    (1.0, TypeError, "1.0"),
    (math.nan, TypeError, "nan"),
    (True, TypeError, "True"),
    ("3", TypeError, "'3'"),
    (None, TypeError, "None"),
    (-1, ValueError, "at least 0, not -1"),
]
BAD_DEADLINES = [
    (-1, ValueError, "-1"),
    (-0.001, ValueError, "-0.001"),
    (math.nan, ValueError, "nan"),
    (math.inf, ValueError, "inf"),
    (True, TypeError, "bool"),
    ("1", TypeError, "str"),
]
BAD_NAMESPACES = [
    ("\ud800", ValueError, "cannot be encoded"),
    (("a", "\ud800"), ValueError, "cannot be encoded"),
    (1, TypeError, "int"),
    (["a"], TypeError, "list"),
    (("a", 1), TypeError, "int"),
    (("a", None), TypeError, "NoneType"),
]


@pytest.mark.parametrize(("tokens", "error", "text"), BAD_TOKENS)
async def test_tokens_that_are_none_are_refused_where_they_are_given(
    tokens, error, text
):
    async with scene() as view:
        with view.cache.request(TOKENS) as request, unchanged(view):
            for call in (view.cache.request, view.cache.match_nowait, request.append):
                with pytest.raises(error, match=text):
                    call(tokens)
            assert request.num_tokens == len(TOKENS)


@pytest.mark.parametrize(
    "tokens", GOOD_TOKENS, ids=lambda tokens: type(tokens).__name__
)
async def test_tokens_may_be_given_in_many_forms(tokens):
    async with scene() as view:
        with view.cache.request(tokens) as request:
            assert bytes(request._state.tokens) == array("i", [1, 2, 3]).tobytes()


@pytest.mark.parametrize(("value", "error", "text"), BAD_COUNTS)
async def test_numbers_of_tokens_are_whole_and_not_negative(value, error, text):
    async with scene() as view:
        with view.cache.request(TOKENS) as request:
            request.extend(5)
            with unchanged(view):
                for call in (request.extend, request.commit, request.truncate):
                    with pytest.raises(error, match=text):
                        call(value)
                with pytest.raises(error, match=text):
                    view.cache.request(TOKENS, reserve_tokens=value)


@pytest.mark.parametrize("kind", [int, np.int64, np.int32])
async def test_numbers_of_tokens_may_be_what_numpy_has_for_ints(kind):
    async with scene() as view:
        with view.cache.request(TOKENS, reserve_tokens=kind(1)) as request:
            assert request.extend(kind(PAGE)) == 1
            compute(view.device, request, TOKENS)
            assert request.commit(kind(PAGE)) == PAGE
            request.truncate(kind(PAGE + 1))


@pytest.mark.parametrize(("value", "error", "text"), BAD_DEADLINES)
async def test_deadlines_are_finite_and_not_negative(value, error, text):
    async with scene(await memory_store(TOKENS)) as view:
        with view.cache.request(TOKENS) as request, unchanged(view):
            with pytest.raises(error, match=text):
                await request.restore(deadline_s=value)
            with pytest.raises(error, match=text):
                await view.cache.drain(deadline_s=value)
            assert not view.cache._runtime._deadlines
            assert request.settled


async def test_deadlines_may_be_huge_or_tiny():
    async with scene(await memory_store(TOKENS)) as view:
        for deadline_s in (1e300, 1, 5e-324):
            with view.cache.request(TOKENS) as request:
                await (await request.restore(deadline_s=deadline_s)).wait()
        assert await view.cache.drain(deadline_s=1e300) == 0


@pytest.mark.parametrize(("namespace", "error", "text"), BAD_NAMESPACES)
async def test_a_namespace_that_is_none_is_refused_before_the_scope_is_entered(
    namespace, error, text
):
    async with scene() as view:
        with unchanged(view):
            with pytest.raises(error, match=text):
                view.cache.request(TOKENS, namespace=namespace)
            with pytest.raises(error, match=text):
                view.cache.match_nowait(TOKENS, namespace=namespace)


async def test_what_is_shared_cannot_fall_and_what_has_no_pages_cannot_be_shared():
    async with scene() as view:
        with view.cache.request(TOKENS) as request:
            request.extend(2 * PAGE)
            compute(view.device, request, TOKENS)
            request.commit(PAGE + 2)
            with unchanged(view):
                for call, text in (
                    (lambda: request.extend(PAGE), "has pages for 8"),
                    (lambda: request.extend(len(TOKENS) + 1), "only 13 are known"),
                    (lambda: request.commit(PAGE), "falls below the 6"),
                    (lambda: request.commit(2 * PAGE + 1), "only 8 have pages"),
                    (lambda: request.truncate(PAGE - 1), "between the 4"),
                    (lambda: request.truncate(len(TOKENS) + 1), "13 that are known"),
                ):
                    with pytest.raises(ValueError, match=text):
                        call()


async def test_a_scope_is_entered_once():
    async with scene() as view:
        scope = view.cache.request(TOKENS)
        for call in (lambda: scope.extend(1), lambda: scope.num_tokens):
            with pytest.raises(OrderError, match="with block"):
                call()
        with pytest.raises(OrderError, match="with block"):
            await scope.restore()
        with scope, unchanged(view), pytest.raises(OrderError, match="entered once"):
            scope.__enter__()
        with pytest.raises(OrderError, match="entered once"):
            scope.__enter__()
        with pytest.raises(ClosedError, match="has ended"):
            scope.extend(1)
        scope.__exit__(None, None, None)


def run_elsewhere(call):
    """Run a call in a thread without a loop; return what it raised."""
    raised = []

    def run():
        try:
            result = call()
            if asyncio.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


async def test_calls_from_another_thread_or_loop_are_refused():
    async with scene(await memory_store(TOKENS)) as view:
        with view.cache.request(TOKENS) as request:
            request.extend(1)
            scope = view.cache.request(TOKENS)
            with unchanged(view):
                for call in (
                    lambda: view.cache.request(TOKENS),
                    lambda: view.cache.match_nowait(TOKENS),
                    lambda: view.cache.gates([request]),
                    lambda: view.cache.forward([request]).__enter__(),
                    view.cache.step,
                    view.cache.drain,
                    view.cache.aclose,
                    lambda: request.extend(2),
                    lambda: request.append([1]),
                    lambda: request.commit(1),
                    lambda: request.truncate(1),
                    request.restore,
                    request.suspend,
                    scope.__enter__,
                ):
                    error = run_elsewhere(call)
                    assert isinstance(error, OrderError), (call, error)
                    assert "another thread or loop" in str(error)
        assert await view.serve(TOKENS) == 3 * PAGE


async def test_calls_on_a_closed_cache_are_refused():
    async with scene(check=False) as view:
        scope = view.cache.request(TOKENS)
        await view.cache.aclose()
        for call in (
            lambda: view.cache.request(TOKENS),
            lambda: view.cache.match_nowait(TOKENS),
            lambda: view.cache.gates([]),
            lambda: view.cache.forward([]).__enter__(),
            scope.__enter__,
        ):
            with pytest.raises(ClosedError, match="closed"):
                call()
        for wait in (view.cache.step, view.cache.drain):
            with pytest.raises(ClosedError, match="closed"):
                await wait()
        with pytest.raises(OrderError, match="opened once"):
            await view.cache.open()
        assert view.cache.statistics().leaked_pages == 0


async def test_a_cache_that_is_not_open_says_so():
    cache = KVCache(LAYOUT, device=CpuDevice(LAYOUT, 4))
    cache.check_invariants()
    with pytest.raises(ClosedError, match="not open"):
        cache.request(TOKENS)
    with pytest.raises(ClosedError, match="never open"):
        cache.statistics()
    await cache.open()
    with pytest.raises(OrderError, match="opened once"):
        await cache.open()
    await cache.aclose()


def test_a_device_of_another_layout_is_refused():
    other = KVLayout(
        model="scene",
        page_tokens=PAGE,
        pools=(AttentionPool(num_layers=3, num_kv_heads=1, head_dim=4, dtype="uint8"),),
    )
    with pytest.raises(ValueError, match="the device was made for KVLayout"):
        KVCache(LAYOUT, device=CpuDevice(other, 4))


@pytest.mark.parametrize("name", ["requests", "slots", "offload_attempts", "restore_s"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (math.nan, (TypeError, ValueError)),
        (math.inf, (TypeError, ValueError)),
    ],
)
def test_limits_are_positive_and_finite(name, value, error):
    with pytest.raises(error, match=name):
        Limits(**{name: value})


def test_limits_must_agree():
    with pytest.raises(TypeError, match="slots must be an int, not float"):
        Limits(slots=64.0)
    with pytest.raises(ValueError, match=r"below slots.* 4 and 4"):
        Limits(slots=4, offloads=4)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Limits(timeout=1)
    assert Limits(restore_s=1).restore_s == 1


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_a_write_threshold_is_at_least_one(value, error):
    with pytest.raises(error, match="threshold"):
        WriteThrough(threshold=value)
