"""What callers pass to a device: checked before anything is touched."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncache.core import KVLayout
from asyncache.devices._pieces import Ints, to_numpy
from asyncache.devices._pool import PageOrder, Pool

_INT_CODES = "bBhHiIlLqQ"
# To mark a page costs less than to sort its id, unless most of the marks stay unused.
_MARKS_PER_ID = 64


def check_page_counts(
    layout: KVLayout, num_pages: int | Mapping[str, int]
) -> Mapping[str, int]:
    """Return the pages of each pool; one number stands for every pool."""
    if not isinstance(num_pages, Mapping):
        num_pages = {pool.name: num_pages for pool in layout.pools}
    check_names(layout, num_pages)
    for name, count in num_pages.items():
        if isinstance(count, bool) or not isinstance(count, int):
            kind = type(count).__name__
            raise TypeError(f"num_pages of pool {name!r} must be an int, not {kind}")
        if count < 1:
            raise ValueError(
                f"num_pages of pool {name!r} must be at least 1, not {count}"
            )
    return num_pages


def check_names(layout: KVLayout, given: Mapping[str, object]) -> None:
    """Check that exactly the layout's pools are named."""
    names = {pool.name for pool in layout.pools}
    if set(given) != names:
        raise ValueError(f"pools must be {sorted(names)}, not {sorted(given)}")


def check_order(order: PageOrder) -> None:
    """Check that an order is no mere string."""
    if not isinstance(order, PageOrder):
        raise TypeError(f"order must be a PageOrder, not {order!r}")


def check_page_ids(pages: Sequence[int], num_pages: int) -> None:
    """Check that page ids are ints within the pool."""
    if isinstance(pages, array):
        if pages.typecode not in _INT_CODES:
            kind = pages.typecode
            raise TypeError(f"page ids must be ints, not an array of {kind!r}")
    elif strange := set(map(type, pages)) - {int}:
        names = sorted(kind.__name__ for kind in strange)
        raise TypeError(f"page ids must be ints, not {names}")
    if len(pages) and not 0 <= min(pages) <= max(pages) < num_pages:
        bad = next(page for page in pages if not 0 <= page < num_pages)
        raise ValueError(f"page ids must be in [0, {num_pages}), got {bad}")


def check_pages(pages: Sequence[int], num_pages: int) -> Ints:
    """Do as :func:`check_page_ids`, for what may be thousands; return them."""
    if not isinstance(pages, array) or pages.typecode not in _INT_CODES:
        check_page_ids(pages, num_pages)
        return to_numpy(pages)
    ids = to_numpy(pages)
    # Unsigned, a negative id is larger than any pool.
    if len(ids) and ids.view(np.uint64).max() >= num_pages:
        check_page_ids(pages, num_pages)
    return ids


def check_unique(ids: Ints, num_pages: int) -> None:
    """Check that no page, of so many in the pool, would be written twice at once."""
    if num_pages <= _MARKS_PER_ID * len(ids):
        is_named = np.zeros(num_pages, dtype=np.bool_)
        is_named[ids] = True
        num_named = np.count_nonzero(is_named)
    else:
        in_order = np.sort(ids)
        num_named = len(ids) - np.count_nonzero(in_order[1:] == in_order[:-1])
    if num_named < len(ids):
        raise ValueError(f"pages to write must differ, got {ids.tolist()}")


def check_apart(sources: Ints, targets: Ints, num_pages: int) -> None:
    """Check that pages can be copied onto others, one each."""
    check_unique(targets, num_pages)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
    if shared := set(sources.tolist()) & set(targets.tolist()):
        raise ValueError(f"pages {sorted(shared)} are both source and target")


def layer_range(layers: range | None, pool: Pool) -> range:
    """Return the layers wanted, all of them for None."""
    num_layers = pool.space.num_layers
    if layers is None:
        return range(num_layers)
    in_bounds = 0 <= layers.start < layers.stop <= num_layers
    if layers.step != 1 or not in_bounds:
        raise ValueError(f"layers must be some of range(0, {num_layers}), not {layers}")
    return layers


def check_buffer(
    buffer: memoryview, num_pages: int, layers: range, pool: Pool
) -> npt.NDArray[np.uint8]:
    """Check that a buffer holds these layers of so many pages; return its bytes.

    The array keeps the buffer, and knows its address.
    """
    wanted = num_pages * len(layers) * pool.space.layer_bytes
    if buffer.nbytes != wanted:
        raise ValueError(
            f"{num_pages} pages of {len(layers)} layers are {wanted} bytes, the buffer "
            f"has {buffer.nbytes}"
        )
    if not buffer.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    return np.frombuffer(buffer, dtype=np.uint8)


def check_target(
    buffer: memoryview, num_pages: int, layers: range, pool: Pool
) -> npt.NDArray[np.uint8]:
    """Do as :func:`check_buffer`, for a buffer that is written to."""
    if buffer.readonly:
        raise ValueError("the buffer must be writable")
    return check_buffer(buffer, num_pages, layers, pool)
