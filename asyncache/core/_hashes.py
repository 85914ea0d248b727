"""Content addresses: the name a page goes by in every store, on every rank.

A page's hash covers its own tokens and, through its parent's hash, all tokens before
them, the model, the layout and the namespace. Nothing here depends on the process, the
rank or the time, so pages written yesterday by another host are found today.

Its first bytes are the same for all pages of a namespace, so that a store can tell
whose a page is: to bound what each may keep, or to encrypt it with a key of its own.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, NewType

from asyncache.core._layout import KVLayout, PageSpace, frame

PageHash = NewType("PageHash", bytes)
Namespace = str | bytes | tuple[str | bytes, ...] | None

# Sized against an adversary, not against accident: whoever finds a collision reads
# another tenant's cache.
HASH_BYTES = 32
TAG_BYTES = 4


class PageKey(NamedTuple):
    """Where a store keeps one page: its content address and what its bytes are."""

    hash: PageHash
    space: PageSpace

    @property
    def name(self) -> str:
        """A file-name-safe text, different for different keys."""
        return f"{self.hash.hex()}-{self.space.name}"

    @property
    def tag(self) -> bytes:
        """The :func:`namespace_tag` of the page's namespace."""
        return tag_of(self.hash)


def tag_of(page_hash: PageHash) -> bytes:
    """Return the :func:`namespace_tag` of a page's namespace."""
    return page_hash[:TAG_BYTES]


def namespace_tag(namespace: Namespace) -> bytes:
    """Return what all page hashes of a namespace begin with, whatever the model.

    It tells of nothing but equality, and two namespaces in some billions share one:
    good enough to count by, and no proof of whose a page is. That is the whole hash.

    Raises:
        TypeError: As for :func:`root_hash`.
        ValueError: As for :func:`root_hash`.
    """
    text = frame(b"asyncache/tag/1", _namespace_bytes(namespace))
    return hashlib.sha256(text).digest()[:TAG_BYTES]


def root_hash(layout: KVLayout, namespace: Namespace = None) -> PageHash:
    """Return the parent of every first page in one namespace of one model.

    Args:
        layout: The model, its revision and the pools.
        namespace: Tenant, adapter or salt that must not share pages with others.
            ``None``, ``""`` and ``b""`` are three different namespaces.

    Raises:
        TypeError: If the namespace is not None, str, bytes or a tuple of str and bytes.
        ValueError: If a str in it cannot be encoded as UTF-8.
    """
    head = frame(
        b"asyncache/root/2",
        _utf8("model", layout.model),
        _utf8("revision", layout.revision),
        layout.identity,
        _namespace_bytes(namespace),
    )
    rest = hashlib.sha256(head).digest()[TAG_BYTES:]
    return PageHash(namespace_tag(namespace) + rest)


def hash_pages(tokens: bytes, *, page_tokens: int, parent: PageHash) -> list[PageHash]:
    """Return the hash of each full page of ``tokens``; a partial last page has none.

    Args:
        tokens: Packed token ids, little-endian int32, shape [num_tokens].
        page_tokens: Tokens a page.
        parent: Hash of the page just before ``tokens``, or a :func:`root_hash`.
    """
    stride = 4 * page_tokens
    sha256 = hashlib.sha256
    digest: bytes = parent
    tag, rest = parent[:TAG_BYTES], slice(TAG_BYTES, None)
    hashes = []
    # Fixed-length parent, fixed-length body: injective without a frame.
    for start in range(0, len(tokens) - stride + 1, stride):
        digest = tag + sha256(digest + tokens[start : start + stride]).digest()[rest]
        hashes.append(digest)
    return hashes  # type: ignore[return-value]  # a NewType costs a call a page


def _namespace_bytes(namespace: Namespace) -> bytes:
    if namespace is None:
        return frame(b"none")
    if isinstance(namespace, tuple):
        return frame(b"tuple", *map(_namespace_part, namespace))
    return _namespace_part(namespace)


def _namespace_part(part: str | bytes) -> bytes:
    if isinstance(part, str):
        return frame(b"str", _utf8("namespace", part))
    if isinstance(part, bytes):
        return frame(b"bytes", part)
    raise TypeError(
        f"a namespace is None, str, bytes or a tuple of them, not {type(part).__name__}"
    )


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} {text!r} cannot be encoded: {error.reason}"
        ) from error
