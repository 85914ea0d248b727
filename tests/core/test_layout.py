"""A layout says what a page's bytes are; layouts that differ have other identities."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from asyncache.core import (
    ITEM_BYTES,
    AttentionPool,
    Coverage,
    KVLayout,
    PageSpace,
    StatePool,
    WindowPool,
)

KV = AttentionPool(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16")
SWA = WindowPool(
    name="swa",
    num_layers=3,
    num_kv_heads=4,
    head_dim=8,
    dtype="float16",
    window_tokens=100,
)
SSM = StatePool(name="ssm", num_layers=5, shape=(8, 4), dtype="float32")
LAYOUT = KVLayout(model="m", page_tokens=16, pools=(KV, SWA))


def test_pools_say_which_pages_a_prefix_needs():
    assert KV.coverage is Coverage.ALL_PAGES
    assert SWA.coverage is Coverage.TRAILING
    assert SSM.coverage is Coverage.ENDPOINT


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (100, 7), (160, 10)]
)
def test_a_window_keeps_whole_pages(tokens, pages):
    assert LAYOUT.window_pages(replace(SWA, window_tokens=tokens)) == pages


def test_a_space_counts_its_bytes():
    space = LAYOUT.space(KV)
    assert space == PageSpace("kv", "0of1", "bfloat16", (2, 2, 16, 4, 8))
    assert space.num_layers == 2
    assert space.layer_bytes == 2 * 16 * 4 * 8 * 2
    assert space.page_bytes == 2 * space.layer_bytes
    assert space.name == "kv-0of1-bfloat16-2x2x16x4x8"


def test_a_slot_has_the_bytes_of_a_state_whatever_a_page_holds():
    layout = replace(LAYOUT, pools=(KV, SSM))
    assert layout.space(SSM) == PageSpace("ssm", "0of1", "float32", (5, 8, 4))
    assert layout.space(SSM) == replace(layout, page_tokens=1).space(SSM)
    assert layout.space(SSM).page_bytes == 5 * 8 * 4 * 4
    assert layout.space(replace(SSM, replicated=True), rank=1).shard == "all"
    assert layout.window_pages(SSM) == 1


def test_the_identity_of_a_layout_without_states_is_what_it_was():
    """Golden: the pages that a store has are found by it."""
    digest = hashlib.sha256(LAYOUT.identity).hexdigest()
    assert digest[:16] == "d6178c583a148941"


def test_a_rank_holds_its_shard_unless_the_pool_is_replicated():
    assert LAYOUT.space(KV, rank=1, num_ranks=4).shard == "1of4"
    latent = replace(KV, replicated=True, num_parts=1)
    assert LAYOUT.space(latent, rank=1, num_ranks=4).shard == "all"


def test_spaces_that_differ_anywhere_have_different_names():
    space = LAYOUT.space(KV)
    others = [
        space,
        replace(space, pool="kv2"),
        replace(space, shard="1of2"),
        replace(space, dtype="float16"),
        replace(space, shape=(2, 2, 16, 8, 4)),
        replace(space, shape=(22, 16, 4, 8)),
    ]
    assert len({other.name for other in others}) == len(others)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_has_a_size(dtype):
    pool = AttentionPool(num_layers=1, num_kv_heads=1, head_dim=1, dtype=dtype)
    space = replace(LAYOUT, pools=(pool,)).space(pool)
    assert space.page_bytes == 2 * 16 * ITEM_BYTES[dtype]


def test_whatever_changes_a_page_changes_the_identity():
    layouts = [
        LAYOUT,
        replace(LAYOUT, page_tokens=8),
        replace(LAYOUT, pools=(KV,)),
        replace(LAYOUT, pools=(SWA, KV)),
        replace(LAYOUT, pools=(KV, replace(SWA, window_tokens=99))),
        replace(LAYOUT, pools=(KV, replace(SWA, name="swb"))),
        replace(LAYOUT, pools=(KV, replace(KV, name="swa"))),
        *(
            replace(LAYOUT, pools=(replace(KV, **{name: value}), SWA))
            for name, value in [
                ("num_layers", 3),
                ("num_kv_heads", 2),
                ("head_dim", 16),
                ("dtype", "float16"),
                ("num_parts", 1),
                ("replicated", True),
            ]
        ),
        *(
            replace(LAYOUT, pools=(KV, *pools))
            for pools in [
                (SSM,),
                (SWA, SSM),
                (replace(SSM, name="ssn"),),
                (replace(SSM, num_layers=4),),
                (replace(SSM, shape=(4, 8)),),
                (replace(SSM, shape=(32,)),),
                (replace(SSM, shape=(8, 4, 1)),),
                (replace(SSM, dtype="float16"),),
                (replace(SSM, replicated=True),),
            ]
        ),
    ]
    assert len({layout.identity for layout in layouts}) == len(layouts)


def test_the_shard_is_no_part_of_the_identity():
    assert LAYOUT.identity == replace(LAYOUT).identity


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"name": "KV"}, ValueError, "a pool's name must match .*, not 'KV'"),
        ({"name": ""}, ValueError, "not ''"),
        ({"name": "a-b"}, ValueError, "not 'a-b'"),
        ({"dtype": "int4"}, ValueError, "dtype must be one of .*, not 'int4'"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, not 0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be at least 1, not -1"),
        ({"head_dim": True}, TypeError, "head_dim must be an int, not bool"),
        ({"num_parts": 2.0}, TypeError, "num_parts must be an int, not float"),
    ],
)
@pytest.mark.parametrize("pool", [KV, SWA])
def test_a_pool_that_cannot_be_is_refused(pool, change, error, says):
    with pytest.raises(error, match=says):
        replace(pool, **change)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"name": "S"}, ValueError, "a pool's name must match .*, not 'S'"),
        ({"dtype": "int4"}, ValueError, "dtype must be one of .*, not 'int4'"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, not 0"),
        ({"shape": [8]}, TypeError, "shape must be a tuple, not list"),
        ({"shape": ()}, ValueError, "shape must have at least one extent, got .."),
        ({"shape": (8, 0)}, ValueError, "extent of shape must be at least 1, not 0"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change, error, says):
    with pytest.raises(error, match=says):
        replace(SSM, **change)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window_tokens must be at least 1, not 0"):
        replace(SWA, window_tokens=0)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"page_tokens": 0}, ValueError, "page_tokens must be at least 1, not 0"),
        ({"page_tokens": "16"}, TypeError, "page_tokens must be an int, not str"),
        ({"pools": [KV]}, TypeError, "pools must be a tuple, not list"),
        ({"pools": (KV, KV)}, ValueError, "must differ, got .'kv', 'kv'."),
        ({"pools": ()}, ValueError, "needs an AttentionPool, got pools .."),
        ({"pools": (SWA,)}, ValueError, "needs an AttentionPool, got pools .'swa'."),
        ({"model": None}, TypeError, "model must be a str, not NoneType"),
        ({"revision": 3}, TypeError, "revision must be a str, not int"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change, error, says):
    with pytest.raises(error, match=says):
        replace(LAYOUT, **change)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"pool": "../kv"}, ValueError, "a pool's name must match .*, not '../kv'"),
        ({"pool": "kv\n"}, ValueError, r"not 'kv\\n'"),
        ({"dtype": "a/b"}, ValueError, "dtype must be one of .*, not 'a/b'"),
        ({"shard": ""}, ValueError, "a shard must match .*, not ''"),
        ({"shard": "0of"}, ValueError, "not '0of'"),
        ({"shard": "all/.."}, ValueError, "not 'all/..'"),
        ({"shard": "0of2\n"}, ValueError, r"not '0of2\\n'"),
        ({"shard": "٠of٢"}, ValueError, "not '٠of٢'"),  # noqa: RUF001 - digits, not ours
        ({"shape": [2, 8]}, TypeError, "shape must be a tuple, not list"),
        ({"shape": ()}, ValueError, "shape must have at least one extent, got .."),
        ({"shape": (2, 0)}, ValueError, "extent of shape must be at least 1, not 0"),
        ({"shape": (2, True)}, TypeError, "extent of shape must be an int, not bool"),
        ({"shape": ("2", 8)}, TypeError, "extent of shape must be an int, not str"),
    ],
)
def test_a_space_whose_name_would_not_do_for_a_file_is_refused(change, error, says):
    with pytest.raises(error, match=says):
        replace(LAYOUT.space(KV), **change)


EXTENTS = st.lists(st.integers(1, 2**40), min_size=1, max_size=6).map(tuple)
SPACES = st.builds(
    PageSpace,
    pool=st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True),
    shard=st.just("all") | st.from_regex(r"[0-9]{1,9}of[0-9]{1,9}", fullmatch=True),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=EXTENTS,
)


@given(SPACES)
def test_a_space_is_found_by_its_name(space):
    assert PageSpace.from_name(space.name) == space


@given(
    st.text()
    | st.tuples(SPACES, st.integers(0, 80), st.text(max_size=2)).map(
        lambda cut: cut[0].name[: cut[1]] + cut[2] + cut[0].name[cut[1] :]
    )
    | st.text("kvalofuint8x0123456789- _\n", max_size=24)
)
def test_what_is_no_spaces_name_is_refused(name):
    with suppress(ValueError):
        assert PageSpace.from_name(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "kv",
        "kv-all-uint8",
        "kv-all-uint8-",
        "kv-all-uint8-x",
        "kv-all-uint8-02",
        "kv-all-uint8-2x+2",
        "kv-all-uint8-2x-2",
        "kv-all-uint8-2x2_0",
        "kv-all-uint8- 2",
        "kv-all-uint8-2x2\n",
        "kv-all-uint8-\u0662",
        "kv-all-uint8-0x2",
        "kv-all-uint8-2-2",
        "kv-some-uint8-2",
        "kv-all-object-2",
        "Kv-all-uint8-2",
        "../kv-all-uint8-2",
        f"kv-all-uint8-{'9' * 5000}",
    ],
)
def test_what_is_nearly_a_spaces_name_is_refused(name):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name!r:.200}')} is no space"):
        PageSpace.from_name(name)
