"""Page hashes name what is in a page; other processes read them: they never change."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from asyncache.core import (
    HASH_BYTES,
    TAG_BYTES,
    AttentionPool,
    KVLayout,
    PageHash,
    PageKey,
    WindowPool,
    hash_pages,
    namespace_tag,
    pack_tokens,
    root_hash,
)

KV = AttentionPool(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16")
LAYOUT = KVLayout(model="org/model", revision="r1", page_tokens=4, pools=(KV,))
TOKENS = pack_tokens(range(10))
GOLDEN_ROOT = "e8dff174048d426ba7db3f436f905ffce91e9d6b5a5b4bff5bed3207b934b05d"
GOLDEN_FIRST = "e8dff174873841de98ba737deddf9548e1b2bb2fe84086035ff949ff94d547db"
GOLDEN_SECOND = "e8dff17470016c3aa0fd4aae163b052f76c46e849e1d0ea9d5ac5d51e5345788"


def test_hashes_and_names_are_what_they_were_yesterday():
    root = root_hash(LAYOUT, ("tenant", b"salt"))
    first, second = hash_pages(TOKENS, page_tokens=4, parent=root)
    assert root.hex() == GOLDEN_ROOT
    assert first.hex() == GOLDEN_FIRST
    assert second.hex() == GOLDEN_SECOND
    name = PageKey(second, LAYOUT.space(KV, rank=1, num_ranks=2)).name
    assert name == f"{GOLDEN_SECOND}-kv-1of2-bfloat16-2x2x4x4x8"


def test_a_page_hashes_its_parent_and_its_tokens():
    root = root_hash(LAYOUT)
    first, second = hash_pages(TOKENS, page_tokens=4, parent=root)
    assert len(root) == len(first) == HASH_BYTES
    assert first[TAG_BYTES:] == hashlib.sha256(root + TOKENS[:16]).digest()[TAG_BYTES:]
    after = hashlib.sha256(first + TOKENS[16:32]).digest()
    assert second[TAG_BYTES:] == after[TAG_BYTES:]


@given(st.binary(max_size=60).map(lambda raw: raw[: len(raw) // 4 * 4]), st.data())
def test_a_chain_may_be_hashed_in_pieces(tokens, data):
    root = root_hash(LAYOUT)
    whole = hash_pages(tokens, page_tokens=2, parent=root)
    assert len(whole) == len(tokens) // 8
    cut = data.draw(st.integers(0, len(whole)))
    upper = hash_pages(tokens[: cut * 8], page_tokens=2, parent=root)
    parent = upper[-1] if upper else root
    assert upper + hash_pages(tokens[cut * 8 :], page_tokens=2, parent=parent) == whole


def test_a_partial_page_has_no_hash():
    assert hash_pages(TOKENS[:12], page_tokens=4, parent=root_hash(LAYOUT)) == []


def test_equal_tokens_after_different_ones_are_different_pages():
    root = root_hash(LAYOUT)
    _, here = hash_pages(pack_tokens([1, 2, 5, 5]), page_tokens=2, parent=root)
    _, there = hash_pages(pack_tokens([1, 3, 5, 5]), page_tokens=2, parent=root)
    assert here != there


NAMESPACES = [
    None,
    "",
    b"",
    (),
    ("",),
    (b"",),
    ("", ""),
    "a",
    b"a",
    ("a",),
    "ab",
    ("a", "b"),
    ("ab", ""),
    ("", "ab"),
    (b"a", "b"),
    ("a", b"b"),
    "None",
    b"none",
    "('a', 'b')",
]


def test_namespaces_that_differ_share_nothing():
    hashes = {root_hash(LAYOUT, name) for name in NAMESPACES}
    assert len(hashes) == len(NAMESPACES)


parts = st.one_of(st.text(max_size=4), st.binary(max_size=4))
names = st.one_of(st.none(), parts, st.lists(parts, max_size=3).map(tuple))


@given(names, names)
def test_namespaces_have_equal_roots_only_if_they_are_equal(one, other):
    same = one == other and type(one) is type(other)
    assert (root_hash(LAYOUT, one) == root_hash(LAYOUT, other)) is same


@pytest.mark.parametrize("name", NAMESPACES)
def test_all_pages_of_a_namespace_have_its_tag_whatever_the_model(name):
    for layout in (LAYOUT, replace(LAYOUT, model="other", page_tokens=2)):
        hashes = hash_pages(TOKENS, page_tokens=2, parent=root_hash(layout, name))
        keys = [PageKey(page_hash, layout.space(KV)) for page_hash in hashes]
        assert {key.tag for key in keys} == {namespace_tag(name)}


def test_namespaces_have_tags_of_their_own():
    assert len(set(map(namespace_tag, NAMESPACES))) == len(NAMESPACES)


@pytest.mark.parametrize("name", ["\ud800", ("fine", "\udfff")])
def test_a_namespace_that_cannot_be_encoded_is_refused(name):
    with pytest.raises(ValueError, match=r"namespace .* cannot be encoded: surrogates"):
        root_hash(LAYOUT, name)


@pytest.mark.parametrize("name", [7, 1.5, ["a"], ("a", None), (("a",),), bytearray(1)])
def test_a_namespace_of_another_type_is_refused(name):
    with pytest.raises(TypeError, match="a namespace is None, str, bytes or a tuple"):
        root_hash(LAYOUT, name)


def test_a_model_that_cannot_be_encoded_is_refused():
    with pytest.raises(ValueError, match=r"model .* cannot be encoded"):
        root_hash(replace(LAYOUT, model="\ud800"))


def test_models_revisions_and_layouts_that_differ_share_nothing():
    window = WindowPool(
        name="swa",
        num_layers=2,
        num_kv_heads=4,
        head_dim=8,
        dtype="bfloat16",
        window_tokens=8,
    )
    layouts = [
        LAYOUT,
        replace(LAYOUT, model="org/model2"),
        replace(LAYOUT, revision="r2"),
        replace(LAYOUT, model="org/modelr", revision="1"),
        replace(LAYOUT, page_tokens=8),
        replace(LAYOUT, pools=(replace(KV, dtype="float16"),)),
        replace(LAYOUT, pools=(KV, window)),
        replace(LAYOUT, pools=(KV, replace(window, window_tokens=4))),
    ]
    assert len({root_hash(layout) for layout in layouts}) == len(layouts)


def test_keys_that_differ_have_different_names():
    spaces = [LAYOUT.space(KV, rank=rank, num_ranks=12) for rank in (0, 1, 11)]
    hashes = [PageHash(bytes([byte]) * HASH_BYTES) for byte in (0, 1)]
    names = sorted(PageKey(page, space).name for page in hashes for space in spaces)
    assert all(one != other for one, other in pairwise(names))
