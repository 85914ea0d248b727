"""What callers pass to a device: checked before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncache.core import KVLayout
from asyncache.devices._host_pool import HostPool, PageOrder


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


def check_pages(pages: Sequence[int], num_pages: int) -> None:
    """Check that page ids are ints within the pool."""
    if strange := set(map(type, pages)) - {int}:
        names = sorted(kind.__name__ for kind in strange)
        raise TypeError(f"page ids must be ints, not {names}")
    if len(pages) and not 0 <= min(pages) <= max(pages) < num_pages:
        bad = next(page for page in pages if not 0 <= page < num_pages)
        raise ValueError(f"page ids must be in [0, {num_pages}), got {bad}")


def check_unique(pages: Sequence[int]) -> None:
    """Check that no page would be written twice at once."""
    if len(set(pages)) != len(pages):
        raise ValueError(f"pages to write must differ, got {list(pages)}")


def layer_range(layers: range | None, pool: HostPool) -> range:
    """Return the layers wanted, all of them for None."""
    num_layers = pool.space.num_layers
    if layers is None:
        return range(num_layers)
    in_bounds = 0 <= layers.start < layers.stop <= num_layers
    if layers.step != 1 or not in_bounds:
        raise ValueError(f"layers must be some of range(0, {num_layers}), not {layers}")
    return layers


def check_buffers(
    pages_buffers: Sequence[Sequence[memoryview]],
    num_pages: int,
    layers: range,
    pool: HostPool,
) -> int:
    """Check that the buffers hold these layers of so many pages; return their bytes."""
    if len(pages_buffers) != num_pages:
        raise ValueError(f"{len(pages_buffers)} lists of buffers for {num_pages} pages")
    layer_bytes = pool.space.layer_bytes
    for buffers in pages_buffers:
        sizes = [buffer.nbytes for buffer in buffers]
        whole = all(size and size % layer_bytes == 0 for size in sizes)
        if not whole or sum(sizes) != len(layers) * layer_bytes:
            raise ValueError(
                f"a page needs {len(layers)} layers of {layer_bytes} bytes, "
                f"got buffers of {sizes}"
            )
        if not all(buffer.c_contiguous for buffer in buffers):
            raise ValueError("buffers must be contiguous")
    return num_pages * len(layers) * layer_bytes
