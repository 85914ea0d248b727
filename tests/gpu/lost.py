"""A GPU that fails, in a child process: everything ends, and nobody else is harmed.

The child's kernel writes where nothing is. From then on its context answers every call
with that error, until the process ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator

import anyio
import torch
from cuda.bindings import driver

from asyncache.core import DeviceError
from asyncache.devices import CudaDevice
from asyncache.engine import KVCache
from asyncache.stores import MemoryStore
from tests.bench import inputs
from tests.bench.gpus import Gpu, check, pick_gpu
from tests.gpu.report import Line, Run

PATIENCE_S = 15.0
NUM_PAGES, PAGE_BYTES = 16, 4096
# The driver compiles it for the GPU that it finds: Turing or later.
KERNEL = b"""
.version 6.5
.target sm_75
.address_size 64
.visible .entry spoil()
{
    .reg .b64 %nowhere;
    .reg .b32 %one;
    mov.u64 %nowhere, 16;
    mov.u32 %one, 1;
    st.global.u32 [%nowhere], %one;
    ret;
}
"""
CHECKS = {
    "copies": "copies in flight end with DeviceError",
    "failure": "the device says why",
    "refusal": "further copies are refused",
    "forwards": "forwards end",
    "close": "the device closes",
    "cache": "a cache over it ends its requests and closes",
}


def run(run: Run) -> Iterator[Line]:
    """Lose the GPU in a child, and copy in the parent before, meanwhile and after."""
    yield from asyncio.run(_beside_a_child(run))


async def _beside_a_child(run: Run) -> list[Line]:
    device = run.gpu.open(inputs.layout(PAGE_BYTES), NUM_PAGES)
    start, num_copies = time.perf_counter(), 0
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gpu.lost", stdout=asyncio.subprocess.PIPE
    )
    talk = asyncio.create_task(child.communicate())
    try:
        while not talk.done() and run.share(1):
            await _round_trip(device, num_copies)
            num_copies += 1
        await _round_trip(device, num_copies)
        is_well = device.failure is None
    finally:
        if not talk.done():
            child.kill()
        output, _ = await talk
        await device.aclose()
    lines = list(_judge(output.decode(), child.returncode))
    note = f"{num_copies} copies in {time.perf_counter() - start:.1f} s"
    what = "the parent's device goes on meanwhile"
    return [*lines, Line(what=what, is_right=is_well, note=note)]


def _judge(output: str, status: int) -> Iterator[Line]:
    found = json.loads(output.strip().rpartition("\n")[2] or "{}")
    for name, what in CHECKS.items():
        problem = found.get(name, f"not reached: the child ended with {status}")
        note = found.get("error", "") if name == "failure" else ""
        yield Line(what=what, is_right=not problem, note=problem or note)


async def _round_trip(device: CudaDevice, number: int) -> None:
    content = bytes([number % 256]) * (NUM_PAGES * PAGE_BYTES)
    ids, target = array("i", range(NUM_PAGES)), bytearray(len(content))
    await device.write_pages("kv", ids, memoryview(content))
    await device.read_pages("kv", ids, memoryview(target))
    assert target == content, "the parent's bytes changed"


# In the child.


async def _lose(gpu: Gpu) -> dict[str, str]:
    """Lose the GPU under copies; return what went wrong of each check."""
    found: dict[str, str] = {}
    layout = inputs.layout(PAGE_BYTES)
    device = gpu.open(layout, NUM_PAGES)
    other = gpu.open(layout, NUM_PAGES)
    store, prompt = MemoryStore(2**20), list(range(4 * inputs.PAGE_TOKENS + 1))
    cache = KVCache(layout, device=other, store=store)
    await cache.open()
    await _serve(cache, prompt)
    cache.reset()
    memory = await device.allocate_staging(NUM_PAGES * PAGE_BYTES)
    ids = array("i", range(NUM_PAGES))
    await device.write_pages("kv", ids, memory)
    _spoil(gpu)
    found["copies"] = await _fail(lambda: device.write_pages("kv", ids, memory))
    found["failure"] = "" if device.failure is not None else "failure is None"
    found["error"] = str(device.failure)
    found["refusal"] = await _fail(lambda: device.read_pages("kv", ids, memory))
    done, loop = anyio.Event(), asyncio.get_running_loop()
    device.when_done(0, lambda: loop.call_soon_threadsafe(done.set))
    found["forwards"] = await _ends(done.wait)
    found["close"] = await _ends(device.aclose)
    found["cache"] = await _ends(lambda: _serve_in_vain(cache, prompt))
    return found


async def _serve(cache: KVCache, prompt: list[int]) -> None:
    with cache.request(prompt) as request:
        request.extend(len(prompt))
        with cache.forward([request], stream=0):
            request.commit(len(prompt))
    await cache.drain()


async def _serve_in_vain(cache: KVCache, prompt: list[int]) -> None:
    try:
        with cache.request(prompt) as request:
            hit = await request.restore()
            await hit.wait()
            assert hit.num_tokens == 0, f"{hit} of a GPU that is lost"
    except DeviceError:
        pass
    await cache.aclose()


async def _fail(copy: Callable[[], Awaitable[object]]) -> str:
    """Return what was not as it should be: copies that fail before long.

    The first may still be in time: its stream does not wait for the kernel.
    """
    try:
        with anyio.fail_after(PATIENCE_S):
            while True:
                await copy()
    except DeviceError:
        return ""
    except TimeoutError:
        return f"no DeviceError in {PATIENCE_S:.0f} s"


async def _ends(call: Callable[[], Awaitable[object]]) -> str:
    """Return what was not as it should be: something that ends in time."""
    try:
        with anyio.fail_after(PATIENCE_S):
            await call()
    except TimeoutError:
        return f"not over in {PATIENCE_S:.0f} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, the line tells it
        return repr(error)
    return ""


def _spoil(gpu: Gpu) -> None:
    """Have the GPU fail, a little later."""
    if gpu.soft is not None:
        error = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        gpu.soft.poison("cuMemcpyBatchAsync", int(error))
        return
    try:
        with gpu.current():
            module = check(driver.cuModuleLoadData(KERNEL))
            spoil = check(driver.cuModuleGetFunction(module, b"spoil"))
            check(driver.cuLaunchKernel(spoil, *[1] * 6, 0, 0, 0, 0))
    except (DeviceError, RuntimeError, TypeError) as error:
        # An index beyond the end is an error of another kind, and as sticky.
        print(f"no kernel: {error}", file=sys.stderr)
        _ = torch.zeros(1, device="cuda")[torch.tensor([2**30], device="cuda")]


def main() -> None:
    """Lose the GPU, and print what came of it as the last line."""
    found = asyncio.run(_lose(pick_gpu()))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
