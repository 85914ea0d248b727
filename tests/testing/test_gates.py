"""Gates hold calls, and a held copy is half done and cannot be recalled."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from asyncache.core import AttentionPool, DeviceError, KVLayout
from asyncache.devices import CpuDevice
from asyncache.testing import Gate, GateDevice

LAYOUT = KVLayout(
    model="m",
    page_tokens=2,
    pools=(AttentionPool(num_layers=1, num_kv_heads=1, head_dim=2, dtype="int8"),),
)
OLD, NEW = b"o" * 8, b"n" * 8
TORN = b"nnnnoooo"


def make_device():
    inner = CpuDevice(LAYOUT, 2)
    for views in inner.page_views("kv", [0, 1]):
        views[0][:] = OLD
    return inner, GateDevice(inner)


def content(inner, page):
    return bytes(inner.page_views("kv", [page])[0][0])


async def test_a_closed_gate_holds_and_an_open_one_does_not():
    gate, passed = Gate(), []

    async def call():
        await gate.pass_through()
        passed.append(gate.num_arrived)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        group.start_soon(call)
        await gate.wait_arrived(2)
        await wait_all_tasks_blocked()
        assert (passed, gate.num_waiting) == ([], 2)
        gate.open()
    assert (passed, gate.num_waiting) == ([2, 2], 0)
    await call()
    assert passed == [2, 2, 3]


async def test_a_gate_opened_and_closed_lets_pass_who_waited():
    gate = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(gate.pass_through)
        await gate.wait_arrived()
        gate.open()
        gate.close()
        group.start_soon(gate.pass_through)
        await gate.wait_arrived(2)
        await wait_all_tasks_blocked()
        assert gate.num_waiting == 1
        assert repr(gate) == "<Gate closed, 2 arrived, 1 wait>"
        group.cancel_scope.cancel()
    assert gate.num_waiting == 0


async def test_closing_a_closed_gate_loses_nobody():
    gate = Gate()
    async with anyio.create_task_group() as group:
        group.start_soon(gate.pass_through)
        await gate.wait_arrived()
        gate.close()
        gate.open()


async def test_a_held_write_is_half_done():
    inner, device = make_device()
    async with anyio.create_task_group() as group:
        group.start_soon(device.write_pages, "kv", [0], memoryview(NEW))
        await device.write_gate.wait_arrived()
        assert (content(inner, 0), content(inner, 1)) == (TORN, OLD)
        device.write_gate.open()
    assert content(inner, 0) == NEW


async def test_a_held_read_is_half_done_and_sees_what_changes_meanwhile():
    inner, device = make_device()
    target = bytearray(b"........")
    async with anyio.create_task_group() as group:
        group.start_soon(device.read_pages, "kv", [0], memoryview(target))
        await device.read_gate.wait_arrived()
        assert target == b"oooo...."
        inner.page_views("kv", [0])[0][0][:] = NEW
        device.read_gate.open()
    assert target == b"oooonnnn"


async def test_a_copy_from_page_to_page_is_held_by_no_gate():
    inner, device = make_device()
    inner.page_views("kv", [0])[0][0][:] = NEW
    device.copy_pages("kv", [0], [1])
    assert content(inner, 1) == NEW


async def test_a_copy_that_has_begun_survives_a_cancelled_scope():
    inner, device = make_device()
    async with anyio.create_task_group() as group:
        group.start_soon(device.write_pages, "kv", [0], memoryview(NEW))
        await device.write_gate.wait_arrived()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert content(inner, 0) == TORN
            device.write_gate.open()
    assert content(inner, 0) == NEW


async def test_a_copy_that_has_begun_survives_native_cancellations():
    inner, device = make_device()
    seen = []

    async def write(*, task_status):
        task_status.started(asyncio.current_task())
        try:
            await device.write_pages("kv", [0], memoryview(NEW))
        except asyncio.CancelledError:
            seen.append(content(inner, 0))
            raise

    async with anyio.create_task_group() as group:
        task = await group.start(write)
        await device.write_gate.wait_arrived()
        for _ in range(3):
            task.cancel()
            await wait_all_tasks_blocked()
        assert seen == []
        device.write_gate.open()
    assert seen == [NEW]


async def test_it_is_not_addressable_by_the_host():
    inner, device = make_device()
    assert not device.host_addressable
    assert device.tensor("kv") is inner.tensor("kv")
    with pytest.raises(DeviceError, match="not addressable"):
        device.page_views("kv", [0])
    assert repr(device).startswith("<GateDevice write=<Gate closed")
