"""CUDA tests run on softcuda, or on a real GPU where there is one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import uvloop

from tests.cuda.scene import Gpu, device_threads
from tests.softcuda import SoftCuda, load, why_not

# Before the first call of the driver: what the bindings find first, they keep.
WHY_NOT = why_not()
SOFTCUDA = None if WHY_NOT else load()
GRACE_S = 5.0


def pytest_asyncio_loop_factories():
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    gpu = Gpu(SOFTCUDA)
    try:
        yield gpu
    finally:
        gpu.close()
        running = surviving_threads()
        if SOFTCUDA is not None:
            left, host_functions = SOFTCUDA.leftovers(), _host_functions(SOFTCUDA)
            SOFTCUDA.reset()
            assert left == {}
            assert host_functions == 0
        assert running == set()


@pytest.fixture
def softcuda(gpu: Gpu) -> SoftCuda:
    """The controls of softcuda; what needs them is skipped on a real GPU."""
    if gpu.softcuda is None:
        pytest.skip("needs softcuda, and there is a real driver")
    return gpu.softcuda


def surviving_threads() -> set[threading.Thread]:
    """Return the threads of devices that do not end by themselves."""
    deadline = time.monotonic() + GRACE_S
    for thread in device_threads():
        thread.join(max(0.0, deadline - time.monotonic()))
    return device_threads()


def _host_functions(softcuda: SoftCuda) -> int:
    names = ("host_functions_run", "host_functions_skipped", "cuLaunchHostFunc")
    return sum(map(softcuda.count, names))
