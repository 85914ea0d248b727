"""An embedder's tensors become pools only if bytes may be copied in and out of them."""

from __future__ import annotations

import mmap
import warnings

import pytest
import torch

from asyncache.core import AttentionPool, DeviceError, KVLayout, StatePool
from asyncache.devices import CpuDevice, PageOrder
from asyncache.testing import check_device

LAYOUT = KVLayout(
    model="m",
    page_tokens=4,
    pools=(AttentionPool(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16"),),
)
SLICE = (2, 4, 2, 8)
NUM_ELEMENTS = 2 * 4 * 2 * 8


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def adopt(tensor, **options):
    return CpuDevice.adopt(LAYOUT, {"kv": tensor}, **options)


async def test_page_first_tensors_keep_the_contract():
    await check_device(lambda: adopt(zeros(5, 3, *SLICE)))


async def test_layer_first_tensors_keep_the_contract():
    await check_device(lambda: adopt(zeros(3, 5, *SLICE), order=PageOrder.LAYER_FIRST))


async def test_pages_with_gaps_between_them_keep_the_contract():
    await check_device(lambda: adopt(zeros(9, 3, *SLICE)[::2]))
    await check_device(lambda: adopt(zeros(5, 4, *SLICE)[:, 1:]))


async def test_one_tensor_a_layer_keeps_the_contract():
    await check_device(lambda: adopt([zeros(5, *SLICE) for _ in range(3)]))
    await check_device(lambda: adopt(zeros(5, 3, *SLICE).unbind(1)[::-1]))


async def test_states_of_a_model_are_adopted_as_they_are():
    """One tensor a layer, as serving engines keep them, in the owner's own axes."""
    state = StatePool(name="state", num_layers=3, shape=(4, 2), dtype="float32")
    layout = KVLayout(model="m", page_tokens=4, pools=(*LAYOUT.pools, state))
    states = [zeros(6, 2, 4, dtype=torch.float32) for _ in range(3)]

    def make():
        tensors = {"kv": zeros(5, 3, *SLICE), "state": states}
        return CpuDevice.adopt(layout, tensors)

    await check_device(make)
    states[1][2] = 5.0
    make().copy_pages("state", [2], [0])
    assert (states[1][0] == 5).all()


async def test_the_tensor_is_the_owners_own():
    tensor = zeros(5, 3, *SLICE)
    device = adopt(tensor)
    assert device.tensor("kv") is tensor
    (views,) = device.page_views("kv", [4])
    views[0][:2] = b"\x80\x3f"  # 1.0 in bfloat16
    assert tensor[4].flatten()[0] == 1


async def test_one_tensor_a_layer_is_read_and_written_in_place():
    layers = [zeros(5, NUM_ELEMENTS) for _ in range(3)]
    device = adopt(layers)
    content = bytearray(range(256)) * 3
    await device.write_pages("kv", [2], memoryview(content))
    raw = b"".join(bytes(layer[2].view(torch.uint8).tolist()) for layer in layers)
    assert raw == content
    assert sum(layer.count_nonzero() for layer in layers) <= 3 * NUM_ELEMENTS
    assert device.layer("kv", 1) is layers[1]
    with pytest.raises(DeviceError, match="ask for a layer"):
        device.tensor("kv")


async def test_layers_that_interleave_in_one_tensor_are_whole_pages():
    whole = zeros(5, 3, *SLICE)
    device = adopt(list(whole.unbind(1)))
    (views,) = device.page_views("kv", [1])
    assert [view.nbytes for view in views] == [whole[0].nbytes]


async def test_layers_in_another_order_than_in_memory_are_told_apart():
    whole = zeros(5, 3, *SLICE)
    device = adopt([whole[:, 2], whole[:, 0], whole[:, 1]])
    content = bytearray(range(256)) * 3
    await device.write_pages("kv", [1], memoryview(content))
    raw = bytes(whole[1].flatten().view(torch.uint8).tolist())
    assert raw == content  # each slice is the same 256 bytes, and none is missing
    assert not whole[[0, 2, 3, 4]].any()


async def test_a_single_page_is_a_pool():
    device = adopt(zeros(1, 3, *SLICE))
    (views,) = device.page_views("kv", [0], range(1, 3))
    assert sum(view.nbytes for view in views) == 512


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (zeros(5, 3, *SLICE, dtype=torch.float16), "torch.float16, the layout says"),
        (zeros(5, 2, *SLICE), "3 layers in the layout, 2 in its tensors"),
        (zeros(3, 5, *SLICE), "3 layers in the layout, 5 in its tensors"),
        (zeros(7), "an axis of pages and one of layers"),
        (zeros(5, 3, 2, 4, 2, 7), "224 bytes a page, the layout says 256"),
        (zeros(0, 3, *SLICE), "no pages"),
        (zeros(5, 3, *SLICE).transpose(2, 3), "in one piece"),
        (zeros(1, 3, *SLICE).expand(5, -1, -1, -1, -1, -1), "share memory"),
        (zeros(5, 1, *SLICE).expand(-1, 3, -1, -1, -1, -1), "share memory"),
        (zeros(5, 3, *SLICE).requires_grad_(), "requires grad"),
        (zeros(5, 3, *SLICE).to("meta"), "CPU tensor, not one on meta"),
        (zeros(5, 3).to_sparse(), "dense tensor, not torch.sparse"),
        ([zeros(5, *SLICE)] * 2, "3 layers in the layout, 2 in its tensors"),
        ([zeros(5, *SLICE)] * 3, "share memory"),
        ([zeros(5, *SLICE), zeros(5, *SLICE), zeros(4, *SLICE)], "layer 2 .* 4 pages"),
        ([zeros(2, 5, 4, 2, 8)] * 3, "640 bytes a page"),
        ([torch.zeros((), dtype=torch.bfloat16)] * 3, "no pages"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor, match):
    with pytest.raises(DeviceError, match=match):
        adopt(tensor)


def test_pages_that_overlap_within_a_tensor_are_refused():
    tensor = zeros(5000).as_strided((5, 3, NUM_ELEMENTS), (200, 128, 1))
    with pytest.raises(DeviceError, match="share memory"):
        adopt(tensor)


def test_pools_that_overlap_are_refused():
    pools = tuple(
        AttentionPool(name=name, num_layers=3, num_kv_heads=2, head_dim=8, dtype="int8")
        for name in ("a", "b")
    )
    layout = KVLayout(model="m", page_tokens=4, pools=pools)
    tensor = zeros(9, 3, *SLICE, dtype=torch.int8)
    CpuDevice.adopt(layout, {"a": tensor[::2], "b": tensor[1::2]})
    with pytest.raises(DeviceError, match="share memory"):
        CpuDevice.adopt(layout, {"a": tensor[:5], "b": tensor[4:]})


def test_a_tensor_whose_storage_is_gone_is_refused():
    tensor = zeros(5, 3, *SLICE)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(DeviceError, match="lost its storage"):
        adopt(tensor)


async def test_memory_mapped_for_reading_is_refused_on_the_event_loop_too():
    with mmap.mmap(-1, 5 * 3 * 256, access=mmap.ACCESS_READ) as memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.frombuffer(memory, dtype=torch.bfloat16)
        with pytest.raises(DeviceError, match="read-only"):
            adopt(tensor.view(5, 3, NUM_ELEMENTS))
        del tensor


def test_only_tensors_are_adopted():
    with pytest.raises(TypeError, match="layer 1 of pool 'kv' must be a tensor"):
        adopt([zeros(5, *SLICE), [0.0], zeros(5, *SLICE)])


def test_the_pools_are_the_layouts():
    with pytest.raises(ValueError, match=r"pools must be \['kv'\], not \['KV'\]"):
        CpuDevice.adopt(LAYOUT, {"KV": zeros(5, 3, *SLICE)})
