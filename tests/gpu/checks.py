"""The contract of a device, on the real driver."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import anyio

from asyncache.core import AttentionPool, KVLayout, StatePool
from asyncache.devices import CudaDevice, PageOrder
from asyncache.testing import check_device
from tests.bench import inputs
from tests.gpu.report import Line, Run

NUM_PAGES, NUM_SMALL_PAGES, PAGE_BYTES = 2048, 64, 16 * 2**10
TESTS = Path("tests/cuda")
NEEDED_FOR_TESTS = ("pytest", "pytest_asyncio", "hypothesis", "blockbuster")
LAYOUT = KVLayout(
    model="checks",
    page_tokens=2,
    pools=(
        AttentionPool(num_layers=3, num_kv_heads=1, head_dim=16, dtype="bfloat16"),
        StatePool(name="state", num_layers=2, shape=(3, 5), dtype="float32"),
    ),
)
Make = Callable[[KVLayout, int], CudaDevice]


def run(run: Run) -> Iterator[Line]:
    """Run the kit and a few checks of bulk, for each order and each kind of wait."""
    num_pages = NUM_SMALL_PAGES if run.is_small else NUM_PAGES
    for order, waits in product(PageOrder, ("fences", "words")):
        make = partial(run.gpu.open, order=order, waits=waits)
        setting = f"{order.value.replace('_', '-')}, {waits}"
        kit = partial(check_device, partial(make, LAYOUT, 4))
        yield _line(f"check_device(), {setting}", kit)
        bulk = partial(_round_trip, make, num_pages)
        yield _line(f"{num_pages} pages there and back, {setting}", bulk)
        cancelled = partial(_cancelled_waits, make, num_pages)
        yield _line(f"waits cancelled in flight, {setting}", cancelled)
    yield from _suite(run)


def _line(what: str, check: Callable[[], Awaitable[None]]) -> Line:
    start = time.perf_counter()
    try:
        asyncio.run(check())
    except Exception as error:  # noqa: BLE001 - whatever it is, the line tells it
        notes = "; ".join(getattr(error, "__notes__", []))
        return Line(what=what, is_right=False, note=f"{error!r} {notes}")
    return Line(what=what, is_right=True, note=f"{time.perf_counter() - start:.1f} s")


async def _round_trip(make: Make, num_pages: int) -> None:
    """Write random bytes to pages in random order, and read them in another."""
    dice = random.Random(0)
    device = make(inputs.layout(PAGE_BYTES, 4), 2 * num_pages)
    ids = array("i", dice.sample(range(2 * num_pages), num_pages))
    source = await device.allocate_staging(num_pages * PAGE_BYTES)
    target = await device.allocate_staging(num_pages * PAGE_BYTES)
    source[:] = dice.randbytes(len(source))
    await device.write_pages("kv", ids, source)
    places = dice.sample(range(num_pages), num_pages)
    await device.read_pages("kv", array("i", [ids[place] for place in places]), target)
    for number, place in enumerate(places):
        assert _page(target, number) == _page(source, place), f"page {place} differs"
    await device.aclose()


async def _cancelled_waits(make: Make, num_pages: int) -> None:
    """Cancel whoever waits: a wait ends only when nothing touches the memory."""
    device = make(inputs.layout(PAGE_BYTES, 4), num_pages)
    memory = await device.allocate_staging(num_pages * PAGE_BYTES)
    ids, dice = array("i", range(num_pages)), random.Random(0)
    for number in range(1, 21):
        memory[:] = bytes([number]) * len(memory)
        with anyio.move_on_after(dice.random() * 1e-3):
            await device.write_pages("kv", ids, memory)
        # Were a copy still under way, it would bring some of these zeros.
        memory[:] = bytes(len(memory))
        await device.read_pages("kv", ids, memory)
        first = memory[0]
        assert first in (number - 1, number), f"{first} in round {number}"
        assert memory.tobytes().count(first) == len(memory), "pages are torn"
        await device.write_pages("kv", ids, memoryview(bytes([number]) * len(memory)))
    await device.aclose()


def _page(memory: memoryview, place: int) -> memoryview:
    return memory[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]


def _suite(run: Run) -> Iterator[Line]:
    """Run pytest where there is all that it needs."""
    what = f"pytest {TESTS}"
    missing = [name for name in NEEDED_FOR_TESTS if not importlib.util.find_spec(name)]
    if run.is_small:
        yield Line(what=what, note="not run: `make test` runs it on softcuda")
    elif not TESTS.is_dir():
        yield Line(what=what, note="not run: there are no such tests")
    elif missing:
        yield Line(what=what, note=f"not run: without {', '.join(missing)}")
    else:
        yield _pytest(what, run.share(1))


def _pytest(what: str, timeout_s: float) -> Line:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(TESTS)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Line(what=what, is_right=False, note=f"not over in {timeout_s:.0f} s")
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
    return Line(what=what, is_right=not done.returncode, note=last)
