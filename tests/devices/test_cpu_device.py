"""Host memory as a device: laid out as asked, checked before it is touched."""

from __future__ import annotations

import gc

import pytest
import torch

from asyncache.core import (
    ITEM_BYTES,
    AttentionPool,
    ClosedError,
    DeviceError,
    KVLayout,
    StatePool,
    WindowPool,
)
from asyncache.devices import CpuDevice, PageOrder
from asyncache.testing import GateDevice, check_device


def make_layout(dtype="bfloat16", num_layers=3, page_tokens=4):
    kv = AttentionPool(num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=dtype)
    window = WindowPool(
        name="window",
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        dtype="float8_e5m2",
        num_parts=1,
        window_tokens=8,
    )
    state = StatePool(name="state", num_layers=2, shape=(3, page_tokens), dtype=dtype)
    return KVLayout(model="m", page_tokens=page_tokens, pools=(kv, window, state))


LAYOUT = make_layout()
# More than is copied on the event loop: the copies of this one go to the thread.
LARGE = make_layout(dtype="float32", page_tokens=1024)


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("host_addressable", [True, False])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
async def test_it_keeps_the_contract(order, host_addressable, dtype):
    await check_device(
        lambda: CpuDevice(
            make_layout(dtype), 5, order=order, host_addressable=host_addressable
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", PageOrder)
async def test_it_keeps_the_contract_when_pages_are_large(order):
    await check_device(lambda: CpuDevice(LARGE, 4, order=order))


@pytest.mark.parametrize("order", PageOrder)
async def test_it_keeps_the_contract_behind_gates(order):
    await check_device(
        lambda: GateDevice(CpuDevice(LAYOUT, 5, order=order), is_open=True)
    )


async def test_pools_may_have_different_numbers_of_pages():
    device = CpuDevice(LAYOUT, {"kv": 7, "window": 2, "state": 3})
    assert dict(device.num_pages) == {"kv": 7, "window": 2, "state": 3}
    assert device.tensor("kv").shape == (7, 3, 2, 4, 2, 8)
    assert device.tensor("window").shape == (2, 1, 1, 4, 1, 4)
    assert device.tensor("state").shape == (3, 2, 3, 4)
    assert not device.tensor("kv").any()


@pytest.mark.parametrize(
    ("order", "num_buffers"), [(PageOrder.PAGE_FIRST, 1), (PageOrder.LAYER_FIRST, 3)]
)
async def test_a_page_has_one_view_for_layers_that_are_neighbours(order, num_buffers):
    device = CpuDevice(LAYOUT, 2, order=order)
    (views,) = device.page_views("kv", [1])
    assert len(views) == num_buffers
    assert (
        sum(view.nbytes for view in views) == LAYOUT.space(LAYOUT.pools[0]).page_bytes
    )


@pytest.mark.parametrize("order", PageOrder)
async def test_a_layer_is_the_tensor_itself(order):
    device = CpuDevice(LAYOUT, 2, order=order)
    device.layer("kv", 2)[1] = 1.5
    assert device.tensor("kv")[1, 2].eq(1.5).all()
    assert device.tensor("kv").sum() == 1.5 * device.tensor("kv")[1, 2].numel()
    with pytest.raises(ValueError, match=r"layer must be in \[0, 3\), not 3"):
        device.layer("kv", 3)


async def test_a_view_outlives_the_device():
    device = CpuDevice(LAYOUT, 2)
    (views,) = device.page_views("kv", [0])
    await device.aclose()
    del device
    gc.collect()
    views[0][:] = bytes(views[0].nbytes)


async def test_a_closed_device_refuses_everything():
    device = CpuDevice(LAYOUT, 2)
    await device.aclose()
    with pytest.raises(ClosedError):
        device.page_views("kv", [0])
    with pytest.raises(ClosedError):
        device.copy_pages("kv", [0], [1])
    assert "closed" in repr(device)


def test_a_copy_from_page_to_page_is_done_on_return():
    """Whatever its size: it is a step of a forward, which waits for nothing."""
    device = CpuDevice(LARGE, 3, order=PageOrder.LAYER_FIRST)
    for pool in ("kv", "state"):
        device.tensor(pool)[1] = 5
        device.copy_pages(pool, [1], [2], stream=7)
        assert (device.tensor(pool)[2] == 5).all()
        assert not device.tensor(pool)[0].any()


async def test_sources_may_be_read_only_and_targets_may_not():
    device = CpuDevice(LAYOUT, 2)
    content = bytes(range(256)) * 3 * 2 * 4 * 2 * 8
    content = content[: LAYOUT.space(LAYOUT.pools[0]).page_bytes]
    await device.write_pages("kv", [1], memoryview(content))
    (views,) = device.page_views("kv", [1])
    assert views[0] == content
    with pytest.raises(ValueError, match="writable"):
        await device.read_pages("kv", [1], memoryview(content))


async def test_buffers_must_be_in_one_piece():
    device = CpuDevice(LAYOUT, 2)
    double = bytearray(2 * LAYOUT.space(LAYOUT.pools[0]).page_bytes)
    with pytest.raises(ValueError, match="contiguous"):
        await device.write_pages("kv", [0], memoryview(double)[::2])


@pytest.mark.parametrize("pages", [[True], [0.0], ["0"], torch.zeros(1)])
async def test_page_ids_are_ints(pages):
    device = CpuDevice(LAYOUT, 2)
    with pytest.raises(TypeError, match="page ids must be ints"):
        device.page_views("kv", pages)


async def test_page_ids_are_within_the_pool():
    device = CpuDevice(LAYOUT, 2)
    with pytest.raises(ValueError, match=r"page ids must be in \[0, 2\), got 2"):
        device.page_views("kv", [1, 2])
    with pytest.raises(ValueError, match=r"page ids must be in \[0, 2\), got -1"):
        device.page_views("kv", [1, -1])


async def test_layers_are_a_plain_range():
    device = CpuDevice(LAYOUT, 2)
    with pytest.raises(
        ValueError, match=r"some of range\(0, 3\), not range\(0, 3, 2\)"
    ):
        device.page_views("kv", [0], range(0, 3, 2))


@pytest.mark.parametrize(
    ("num_pages", "error", "match"),
    [
        (0, ValueError, "at least 1, not 0"),
        (-1, ValueError, "at least 1, not -1"),
        (True, TypeError, "not bool"),
        (1.0, TypeError, "not float"),
        ({"kv": 1}, ValueError, "pools must be"),
        ({"kv": 1, "window": 1, "other": 1}, ValueError, "pools must be"),
    ],
)
def test_a_pool_needs_a_page(num_pages, error, match):
    with pytest.raises(error, match=match):
        CpuDevice(LAYOUT, num_pages)


def test_the_order_is_an_enum():
    with pytest.raises(TypeError, match="PageOrder"):
        CpuDevice(LAYOUT, 1, order="page_first")


def test_too_many_pages_are_a_device_error():
    with pytest.raises(DeviceError, match=r"no [0-9]+ bytes for pool 'kv'"):
        CpuDevice(LAYOUT, {"kv": 2**50, "window": 1, "state": 1})
