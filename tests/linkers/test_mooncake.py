"""MooncakeLinker: what it asks of Mooncake, and what it makes of wrong bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch

from asyncache import CpuDevice, MooncakeLinker, MooncakeSetup
from asyncache.core import (
    Asked,
    ClosedError,
    DeviceError,
    KVLayout,
    LookupPlan,
    StoreError,
)
from asyncache.linkers import Outcome
from asyncache.linkers._mooncake_client import is_there
from asyncache.testing import GateDevice
from tests.engine.scene import keys, prompt, read, scene, write
from tests.linkers.mooncake_server import bare_client
from tests.linkers.plans import (
    KV,
    LAYOUT,
    PAGE,
    PAGE_BYTES,
    TOKENS,
    hashes,
    load_plan,
    make_device,
    meant,
    offload_plan,
)
from tests.linkers.worlds import MooncakeWorld, WatchedClient
from tests.servers import free_port

KEYS = keys(TOKENS, None, KV, LAYOUT)
OBJECT_BYTES = PAGE_BYTES + 128
LOOKUP = LookupPlan(1, 0, 5, (Asked(0, 0, hashes()),))


@pytest.fixture
def watched(client):
    return WatchedClient(client)


@pytest.fixture
def world(watched):
    return MooncakeWorld(watched)


async def store_pages(world):
    device = make_device("pages")
    for page in range(5):
        write(device, page, meant(page))
    linker = world.link(device)
    # It is not open yet.
    assert await linker.offload(offload_plan(range(5))) is Outcome.FAILED
    assert await linker.load(load_plan(range(5)), lambda layer: None) == 0
    await linker.open()
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    await linker.aclose()


def without(module):
    """Return what a linker raises where something cannot be imported."""
    code = f"""
import sys
sys.modules["{module}"] = None
import asyncache, asyncache.core
pool = asyncache.AttentionPool(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8")
layout = asyncache.KVLayout(model="m", page_tokens=1, pools=(pool,))
setup = asyncache.MooncakeSetup(master_server_addr="localhost:1")
try:
    asyncache.MooncakeLinker(setup, asyncache.CpuDevice(layout, 1))
except ImportError as error:
    print(error)
"""
    return run(code).stdout


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_mooncake_it_says_what_to_install():
    said = without("mooncake.store")
    assert "pip install 'asyncache[mooncake]'" in said
    assert "apt-get install libibverbs1" in said


def test_mooncake_is_not_imported_before_it_is_used():
    run(
        "import sys, asyncache; asyncache.MooncakeLinker; asyncache.MooncakeSetup; "
        "assert not any(name.startswith('mooncake') for name in sys.modules)"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_bytes": PAGE_BYTES - 1}, f"hold a page, {PAGE_BYTES}: "),
        ({"prefix": ""}, "prefix must match .* not ''"),
        ({"prefix": "a/b"}, "prefix must match .* not 'a/b'"),
        ({"lookup_s": 0}, "lookup_s must be in .* not 0"),
        ({"lookup_s": float("nan")}, "lookup_s must be in .* not nan"),
        ({"client_ttl_s": -1}, "client_ttl_s must be in .* not -1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        MooncakeLinker(WatchedClient(None), CpuDevice(LAYOUT, 4), **arguments)
    with pytest.raises(ValueError, match="master_server_addr must be host:port"):
        MooncakeSetup(master_server_addr="")
    with pytest.raises(ValueError, match="must be at least 0: -1"):
        MooncakeSetup(master_server_addr="a:1", global_segment_size=-1)


def test_a_device_that_tells_no_addresses_is_refused():
    far = GateDevice(CpuDevice(LAYOUT, 4))
    with pytest.raises(DeviceError, match="does not tell where its pages are"):
        MooncakeLinker(WatchedClient(None), far)


async def test_what_other_processes_read_is_pinned(world, client):
    await store_pages(world)
    name = f"{world.prefix}:sealed-1:{hashes()[0].hex()}-kv-0of1-uint8-4x2x4x1x4"
    assert client.get_size(name) == OBJECT_BYTES
    with_tail = client.get(name)
    assert with_tail[:PAGE_BYTES] == meant(0)
    assert with_tail[PAGE_BYTES:].startswith(b"asyncache-kv\x01\x00\x01\x00\x04\x00")


async def test_a_lookup_is_one_call_and_transfers_are_calls_of_a_bounded_batch(
    world, watched
):
    await store_pages(world)
    watched.calls.clear()
    linker = world.link(make_device("pages"), batch_bytes=2 * PAGE_BYTES)
    await linker.open()
    assert await linker.lookup(LOOKUP) == [[True] * 5]
    assert await linker.load(load_plan(range(5)), lambda layer: None) == 5
    await linker.aclose()
    names = [name for name, _ in watched.calls if "register" not in name]
    assert names == ["batch_is_exist"] + ["batch_get_into_multi_buffers"] * 3
    nums = [len(args[0]) for name, args in watched.calls if "get_into" in name]
    assert nums == [2, 2, 1]


async def test_memory_is_registered_from_open_to_close_and_no_longer(world, watched):
    linker = world.link(make_device("layers"))
    assert watched.calls == [], "the constructor does no I/O"
    await linker.open()
    await linker.open()
    known = [args[0] for name, args in watched.calls if name == "register_buffer"]
    assert len(set(known)) == len(known) == 4 + 2, "four layers, tails of two ways"
    await linker.aclose()
    await linker.aclose()
    gone = [args[0] for name, args in watched.calls if name == "unregister_buffer"]
    assert sorted(gone) == sorted(known)
    assert watched.num_calls("close") == 0, "the client stays the caller's"
    for call in (linker.open, lambda: linker.lookup(LOOKUP)):
        with pytest.raises(ClosedError, match="the linker is closed"):
            await call()
    with pytest.raises(ClosedError, match="the linker is closed"):
        await linker.load(load_plan([0]), lambda layer: None)
    with pytest.raises(ClosedError, match="the linker is closed"):
        await linker.offload(offload_plan([0]))


async def test_memory_that_is_registered_already_is_refused_and_nothing_is_left(
    world, watched, client
):
    device = make_device("layers")
    third = sorted(device.spans())[2]
    assert client.register_buffer(third.address, third.num_bytes) == 0
    linker = world.link(device)
    with pytest.raises(StoreError, match="are they registered already"):
        await linker.open()
    assert watched.num_calls("unregister_buffer") == 2
    await linker.aclose()
    assert client.unregister_buffer(third.address) == 0


async def test_pools_that_interleave_in_memory_are_registered_once(world):
    """Guards owners whose tensors of different pools share one allocation."""
    layout = KVLayout(
        model="linked", page_tokens=PAGE, pools=(KV, replace(KV, name="other"))
    )
    both = torch.zeros(16, 2, 4, 2, PAGE, 1, 4, dtype=torch.uint8)
    device = CpuDevice.adopt(layout, {"kv": both[:, 0], "other": both[:, 1]})
    assert len(device.spans()) == 1
    for page in range(5):
        write(device, page, meant(page))
    both[:, 1] = 7
    linker = world.link(device)
    await linker.open()
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    assert await linker.load(load_plan(range(8, 13)), lambda layer: None) == 5
    await linker.aclose()
    assert [read(device, 8 + at) for at in range(5)] == [meant(at) for at in range(5)]
    assert (both[:, 1] == 7).all()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


WRONG = {
    "a bit of the first slice": lambda data, other: flipped(data, 0),
    "a bit of the last slice": lambda data, other: flipped(data, PAGE_BYTES - 1),
    "a bit of the tail": lambda data, other: flipped(data, PAGE_BYTES),
    "the last bit": lambda data, other: flipped(data, len(data) - 1),
    "another page": lambda data, other: other,
    "no tail": lambda data, other: data[:PAGE_BYTES],
    "short": lambda data, other: data[:7],
    "long": lambda data, other: data + b"x",
    "much longer": lambda data, other: data * 50,
    "zeros": lambda data, other: bytes(len(data)),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_was_not_put_is_not_served_and_goes_away(world, client, wrong):
    await store_pages(world)
    name, data = world.name(KEYS[2]), client.get(world.name(KEYS[2]))
    assert client.remove(name, True) == 0
    other = client.get(world.name(KEYS[3]))
    assert client.put(name, WRONG[wrong](data, other)) == 0
    device, landed = make_device("pages"), []
    linker = world.link(device)
    await linker.open()
    assert await linker.load(load_plan(range(5)), landed.append) == 2
    assert landed == []
    assert await linker.lookup(LOOKUP) == [[True, True, False, True, True]]
    for page in range(5):
        write(device, 8 + page, meant(page))
    assert await linker.offload(offload_plan(range(8, 13))) is Outcome.STORED
    assert await linker.load(load_plan(range(5)), landed.append) == 5
    assert [read(device, at) for at in range(5)] == [meant(at) for at in range(5)]
    await linker.aclose()


async def test_pages_without_digests_are_objects_of_their_own(world, client):
    device = make_device("pages")
    for page in range(5):
        write(device, page, meant(page))
    bare, sealed = world.link(device, checksums=False), world.link(make_device("pages"))
    await bare.open()
    await sealed.open()
    assert await bare.offload(offload_plan(range(5))) is Outcome.STORED
    assert await sealed.lookup(LOOKUP) == [[False] * 5]
    assert await sealed.load(load_plan(range(5)), lambda layer: None) == 0
    name = world.name(KEYS[2]).replace("sealed-1", "bare-1")
    assert client.get_size(name) == PAGE_BYTES
    # They vouch for their size and no more.
    data = client.get(name)
    for wrong, num_good in ((flipped(data, 0), 5), (data + b"x", 2)):
        assert client.remove(name, True) == 0
        assert client.put(name, wrong) == 0
        landed = []
        assert await bare.load(load_plan(range(8, 13)), landed.append) == num_good
        assert len(landed) == (num_good == 5)
        assert [read(device, 8 + at) for at in (0, 1)] == [meant(0), meant(1)]
    assert await bare.lookup(LOOKUP) == [[True, True, False, True, True]]
    await bare.aclose()
    await sealed.aclose()


async def test_a_cache_goes_on_over_a_corrupt_object_and_mends_it(world, client):
    tokens = prompt(3)
    for expected, is_tampered in ((0, False), (4, True), (12, False)):
        if is_tampered:
            name = world.name(keys(tokens)[1])
            data = client.get(name)
            assert client.remove(name, True) == 0
            assert client.put(name, flipped(data, 3)) == 0
        async with scene(linker=world.link) as view:
            assert await view.serve(tokens) == expected


async def test_a_linker_of_its_own_setup_gives_memory_and_closes_it(master, world):
    setup = replace(master.setup, global_segment_size=16 * 2**20)
    linker = MooncakeLinker(setup, make_device("pages"), prefix=world.prefix)
    await linker.open()
    assert await linker.offload(offload_plan(range(5))) is Outcome.STORED
    assert await linker.load(load_plan(range(8, 13)), lambda layer: None) == 5
    with anyio.fail_after(20):
        await linker.aclose()
    assert linker._link.client is None
    again = MooncakeLinker(master.setup, make_device("pages"), prefix=world.prefix)
    await again.aclose()  # never opened


@pytest.mark.parametrize("hostname", ["127.0.0.1:{port}", "localhost", "[::1]"])
async def test_a_host_has_a_port_or_is_given_one(master, world, hostname):
    await store_pages(world)
    name = hostname.format(port=free_port())
    setup = replace(master.setup, local_hostname=name)
    linker = MooncakeLinker(setup, make_device("pages"), prefix=world.prefix)
    await linker.open()
    assert await linker.load(load_plan(range(5)), lambda layer: None) == 5
    await linker.aclose()


async def test_a_setup_that_can_never_work_is_told_of_at_open(master):
    setup = replace(master.setup, protocol="pigeon")
    linker = MooncakeLinker(setup, make_device("pages"))
    with pytest.raises(StoreError, match=r"cannot be set up as .*pigeon.*: code -600"):
        await linker.open()
    await linker.aclose()


@pytest.mark.parametrize(
    "address", ["etcd://127.0.0.1:1", "redis://a:1/2", "nobody", "host:port"]
)
def test_a_master_that_is_found_otherwise_is_taken_to_be_there(address):
    assert is_there(MooncakeSetup(master_server_addr=address))


@pytest.mark.parametrize("code", [-600, -800, -900, -1])
async def test_what_mooncake_says_of_a_read_ends_the_load_or_is_our_fault(
    world, watched, code
):
    await store_pages(world)
    linker = world.link(make_device("pages"))
    await linker.open()
    good = OBJECT_BYTES
    watched.codes["batch_get_into_multi_buffers"] = [good, good, code, good, good]
    if code == -600:
        with pytest.raises(StoreError, match=r"refuses to read .*code -600"):
            await linker.load(load_plan(range(5)), lambda layer: None)
    else:
        assert await linker.load(load_plan(range(5)), lambda layer: None) == 2
    assert watched.num_calls("remove") == 0
    await linker.aclose()


@pytest.mark.parametrize(
    ("code", "outcome", "num_calls"),
    [
        (-200, Outcome.REJECTED, 2),
        (-800, Outcome.FAILED, 1),
        (-900, Outcome.FAILED, 2),
        (-600, StoreError, 2),
    ],
)
async def test_what_mooncake_says_of_a_write_is_the_offloads_outcome(
    world, watched, code, outcome, num_calls
):
    linker = world.link(make_device("pages"))
    await linker.open()
    watched.codes["batch_put_from_multi_buffers"] = [0, 0, code, 0, 0]
    for _ in range(2):
        if outcome is StoreError:
            with pytest.raises(StoreError, match="refuses to store pages of kv-0of1"):
                await linker.offload(offload_plan(range(5)))
        else:
            assert await linker.offload(offload_plan(range(5))) is outcome
    # After a transfer that failed, nothing is put for a while.
    assert watched.num_calls("batch_put_from_multi_buffers") == num_calls
    await linker.aclose()


async def test_a_parent_that_nobody_knows_of_is_not_missing(world, watched):
    linker = world.link(make_device("pages"))
    await linker.open()
    watched.codes["batch_is_exist"] = [-900]
    plan = offload_plan([3], start=1, parent=hashes()[0])
    assert await linker.offload(plan) is Outcome.FAILED
    watched.codes["batch_is_exist"] = [-1] * 5
    assert await linker.lookup(LOOKUP) == [[False] * 5]
    await linker.aclose()


async def test_two_setups_in_one_process_share_pages(master, world):
    with bare_client(master) as second:
        await store_pages(world)
        device = make_device("pages")
        linker = MooncakeLinker(second, device, prefix=world.prefix)
        await linker.open()
        assert await linker.load(load_plan(range(5)), lambda layer: None) == 5
        await linker.aclose()
