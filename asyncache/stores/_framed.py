"""Pages as files, for whoever carries them from one store to another."""

from __future__ import annotations

from typing import NamedTuple

from asyncache.core import PageKey
from asyncache.stores._frame import Frame


class FramedPage(NamedTuple):
    """What is in the file of a page."""

    page: memoryview
    """All layers, in the memory that was given."""
    has_digests: bool
    """Whether they are known to be what was put; else only the key is."""


def frame_page(key: PageKey, page: memoryview, *, checksums: bool = True) -> bytes:
    """Return the head that goes before a page's bytes in a file, as in a FileStore.

    Args:
        key: The page.
        page: All its layers, of format "B".
        checksums: Whether to vouch for the bytes; not for what nobody verified.

    Raises:
        ValueError: If that is not the length of the page.
    """
    frame = Frame(key.space)
    if page.nbytes != frame.page_bytes:
        raise ValueError(f"a page has {frame.page_bytes} bytes, not {page.nbytes}")
    return frame.head(key.hash, frame.digests([page]) if checksums else None)


def unframe_page(key: PageKey, framed: memoryview) -> FramedPage:
    """Return what is in the file of a page.

    Raises:
        ValueError: If that is not, to the bit, a file that was written for this page.
    """
    frame = Frame(key.space)
    if framed.nbytes != frame.file_bytes:
        raise ValueError(f"a file has {frame.file_bytes} bytes, not {framed.nbytes}")
    head, page = bytearray(framed[: frame.head_bytes]), framed[frame.head_bytes :]
    if not frame.is_head_of(key.hash, head):
        raise ValueError("the head is another page's, or rotten")
    has_digests = frame.has_digests(head)
    if has_digests and not frame.are_slices_of(head, range(frame.num_layers), [page]):
        raise ValueError("the bytes are not what the head vouches for")
    return FramedPage(page, has_digests)
