"""What each namespace may keep in a SegmentStore."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from asyncache.core import (
    TAG_BYTES,
    Namespace,
    PageHash,
    PageKey,
    PageSpace,
    namespace_tag,
)
from asyncache.stores import SegmentStore, Status
from asyncache.testing._samples import SPACE
from tests.stores.segments import (
    SLOT,
    WIDE,
    WIDE_SLOT,
    counts,
    get,
    numbered,
    put,
    small_store,
    which,
)

HIT, REJECTED = Status.HIT, Status.REJECTED


def pages_of(
    namespace: Namespace, start: int, stop: int, space: PageSpace = SPACE
) -> list[PageKey]:
    tag = namespace_tag(namespace)
    return [
        PageKey(PageHash(tag + key.hash[:-TAG_BYTES]), space)
        for key in numbered(start, stop)
    ]


async def test_a_namespace_over_its_bound_loses_its_own_oldest_pages(tmp_path):
    greedy, modest = pages_of("greedy", 0, 9), pages_of("modest", 0, 3)
    async with small_store(tmp_path, 1, 16, namespace_bytes=4 * SLOT) as store:
        assert await put(store, modest) == [HIT] * 3
        for key in greedy:
            assert await put(store, [key]) == [HIT]
        assert await which(store, modest) == [0, 1, 2]
        # A little more goes than has to.
        assert await which(store, greedy) == [6, 7, 8]
    assert counts(tmp_path)["page"] == 6


async def test_pages_that_were_used_stay(tmp_path):
    keys = pages_of("a", 0, 5)
    async with small_store(tmp_path, 1, 16, namespace_bytes=4 * SLOT) as store:
        await put(store, keys[3::-1])
        assert await get(store, keys[:1]) == [HIT]
        await put(store, keys[4:])
        assert await which(store, keys) == [0, 3, 4]


async def test_only_those_that_are_named_have_a_bound(tmp_path):
    bounds = {"a": 2 * SLOT, None: 3 * SLOT}
    async with small_store(tmp_path, 1, 32, namespace_bytes=bounds) as store:
        for name, num_left in (("a", 1), (None, 2), ("b", 8), ("", 8)):
            keys = pages_of(name, 0, 8)
            for key in keys:
                await put(store, [key])
            assert len(await which(store, keys)) in {num_left, num_left + 1}, name


async def test_pages_of_all_spaces_count(tmp_path):
    narrow, wide = pages_of("a", 0, 4), pages_of("a", 0, 2, WIDE)
    options = {"namespace_bytes": 3 * SLOT + WIDE_SLOT}
    async with small_store(tmp_path, 2, 8, **options) as store:
        await put(store, wide[:1])
        await put(store, narrow[:3])
        assert await which(store, [*wide, *narrow]) == [0, 2, 3, 4]
        await put(store, narrow[3:])
        # The oldest of them all.
        assert await which(store, [*wide, *narrow]) == [2, 3, 4, 5]


async def test_what_can_never_be_kept_is_refused_and_not_written(tmp_path):
    small, large = pages_of("a", 0, 2), pages_of("a", 0, 2, WIDE)
    other = pages_of("b", 0, 1, WIDE)
    bounds = {"a": WIDE_SLOT - 1, "c": 0}
    async with small_store(tmp_path, 2, 8, namespace_bytes=bounds) as store:
        keys = [*large, *small[:1], *other, *pages_of("c", 0, 1)]
        assert await put(store, keys) == [REJECTED, REJECTED, HIT, HIT, REJECTED]
        assert await which(store, keys) == [2, 3]


async def test_a_bound_binds_whoever_has_it(tmp_path):
    keys = pages_of("a", 0, 12)
    async with (
        small_store(tmp_path, 1, 16) as free,
        small_store(tmp_path, 1, 16, namespace_bytes=4 * SLOT) as bound,
    ):
        assert await put(free, keys[7::-1]) == [HIT] * 8
        assert len(await which(bound, keys)) == 8
        await put(bound, keys[8:9])
        assert await which(free, keys) == [6, 7, 8]


@settings(max_examples=20, deadline=None)
@given(
    writes=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 30)), max_size=40
    )
)
async def test_nobody_is_ever_over_its_bound(tmp_path_factory, writes):
    directory = tmp_path_factory.mktemp("store")
    bounds = {"a": 5 * SLOT, "b": 9 * SLOT}
    async with small_store(directory, 4, 8, namespace_bytes=bounds) as store:
        for name, number in writes:
            keys = pages_of(name, number, number + 3)
            assert await put(store, keys) == [HIT] * 3
            for bounded, most in bounds.items():
                pages = pages_of(bounded, 0, 33)
                assert len(await which(store, pages)) <= most // SLOT
            assert await which(store, keys[-1:]) == [0]
    counts(directory)


@pytest.mark.parametrize(
    ("bounds", "error", "text"),
    [
        (-1, ValueError, "namespace_bytes must be at least 0, not -1"),
        ({"a": -5}, ValueError, "namespace_bytes must be at least 0, not -5"),
        ({"a": 1.5}, TypeError, "namespace_bytes must be an int, not float"),
        ({"a": None}, TypeError, "namespace_bytes must be an int, not NoneType"),
        (True, TypeError, "namespace_bytes must be an int, not bool"),
        ({7: 1}, TypeError, "a namespace is None, str, bytes or a tuple of them"),
    ],
)
def test_bad_bounds_are_named(tmp_path, bounds, error, text):
    with pytest.raises(error, match=text):
        SegmentStore(tmp_path, 2**28, namespace_bytes=bounds)
