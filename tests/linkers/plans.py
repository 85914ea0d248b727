"""A small model, its pages, and the plans that move them."""

from __future__ import annotations

from array import array

from asyncache.core import (
    AttentionPool,
    KVLayout,
    LoadPlan,
    Moved,
    OffloadPlan,
    WindowPool,
)
from asyncache.devices import CpuDevice, PageOrder
from asyncache.testing import GateDevice
from tests.engine.scene import content, keys

PAGE = 4
KV = AttentionPool(num_layers=4, num_kv_heads=1, head_dim=4, dtype="uint8")
SWA = WindowPool(
    name="swa",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="uint8",
    window_tokens=2 * PAGE,
)
LAYOUT = KVLayout(model="linked", page_tokens=PAGE, pools=(KV,))
HYBRID = KVLayout(model="linked", page_tokens=PAGE, pools=(KV, SWA))
TOKENS = list(range(5 * PAGE))
PAGE_BYTES = LAYOUT.space(KV).page_bytes


def make_device(kind, layout=LAYOUT, num_pages=16):
    """Return a poisoned device: in place, in two orders of memory, or far away."""
    order = PageOrder.LAYER_FIRST if kind == "layers" else PageOrder.PAGE_FIRST
    device = CpuDevice(layout, num_pages, order=order)
    for pool in layout.pools:
        device.tensor(pool.name).fill_(0xFF)
    return GateDevice(device, is_open=True) if kind == "staged" else device


def hashes(layout=LAYOUT):
    return [key.hash for key in keys(TOKENS, None, KV, layout)]


def load_plan(pages, start=0):
    names = hashes()[start : start + len(pages)]
    piece = Moved(0, start, array("i", pages), names)
    return LoadPlan(1, start, start + len(pages), (piece,))


def offload_plan(pages, start=0, parent=None):
    names = hashes()[start : start + len(pages)]
    piece = Moved(0, start, array("i", pages), names)
    return OffloadPlan(1, start, start + len(pages), (piece,), parent)


def meant(position, pool=KV, layout=LAYOUT):
    return content(TOKENS, position, pool, layout)
