"""What a device needs to begin, and that it leaves nothing where it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver

import asyncache
from asyncache.core import DeviceError
from asyncache.devices import CudaDevice
from tests.cuda.scene import (
    KV,
    LAYOUT,
    OUT_OF_MEMORY,
    STATE,
    Lie,
    device_threads,
    ok,
)

CALLS = [
    ("cuInit", 1),
    ("cuDeviceGetCount", 1),
    ("cuDeviceGet", 1),
    ("cuDevicePrimaryCtxRetain", 1),
    ("cuDevicePrimaryCtxRetain", 2),
    ("cuDevicePrimaryCtxRetain", 4),
    ("cuCtxPushCurrent", 1),
    ("cuStreamCreateWithPriority", 1),
    ("cuStreamCreateWithPriority", 2),
    ("cuDriverGetVersion", 1),
    ("cuMemHostAlloc", 1),
    ("cuMemHostGetDevicePointer", 1),
]


@pytest.mark.parametrize(("name", "nth"), CALLS)
def test_what_was_opened_is_closed_when_the_next_is_refused(gpu, softcuda, name, nth):
    tensors = {"kv": gpu.pool(Lie.GAPS, KV, 3), "state": gpu.pool(Lie.GAPS, STATE, 3)}
    softcuda.refuse(name, OUT_OF_MEMORY, nth=nth)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        CudaDevice.adopt(LAYOUT, tensors, waits="words")
    assert set(softcuda.leftovers()) == {"declared_ranges"}


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_thread_that_cannot_be_started_is_an_error_before_anything_is_begun(
    gpu, monkeypatch, nth
):
    start, turns = threading.Thread.start, iter(range(1, 9))

    def refuse(thread):
        if next(turns) == nth:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DeviceError, match=r"no thread asyncache-.*can't start"):
        gpu.device()
    assert not device_threads()


def test_options_out_of_bounds_are_refused(gpu):
    for close_s in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"at least 0 and finite, not {close_s}"):
            gpu.device(close_s=close_s)
    with pytest.raises(ValueError, match='must be "fences" or "words", not \'events\''):
        gpu.device(waits="events")


def test_a_gpu_that_is_not_there_is_an_error(gpu, softcuda):
    softcuda.set_devices(2)
    for ordinal in (-1, 2):
        with pytest.raises(DeviceError, match=rf"in \[0, 2\), not {ordinal}"):
            CudaDevice(LAYOUT, 2, ordinal=ordinal)


def test_a_driver_without_a_gpu_is_an_error(gpu, softcuda):
    softcuda.set_devices(0)
    with pytest.raises(DeviceError, match="of no use here: CUDA_ERROR_NO_DEVICE"):
        CudaDevice(LAYOUT, 2)


@pytest.mark.slow
def test_without_a_driver_there_is_an_error_and_all_else_works():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_A_DRIVER],
        cwd=Path(asyncache.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("there is no CUDA driver: ")


WITHOUT_A_DRIVER = """
import ctypes, sys
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    pass
else:
    print("there is no CUDA driver: skipped, for there is one")
    sys.exit()
from asyncache.core import AttentionPool, DeviceError, KVLayout
from asyncache.devices import CpuDevice, CudaDevice
pool = AttentionPool(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16")
layout = KVLayout(model="m", page_tokens=4, pools=(pool,))
for _ in range(2):
    try:
        CudaDevice(layout, 1)
    except DeviceError as error:
        print(error)
CpuDevice(layout, 1)
"""


def test_a_torch_without_cuda_cannot_allocate_there_and_says_so(gpu, softcuda):
    with pytest.raises(DeviceError, match=r"torch .* cannot allocate on a GPU here"):
        CudaDevice(LAYOUT, 4)


def test_host_memory_is_refused(gpu, softcuda):
    tensors = {"kv": torch.zeros(2, *KV.shape, dtype=torch.bfloat16)}
    tensors["state"] = gpu.pool(Lie.PAGE_FIRST, STATE, 2)
    with pytest.raises(DeviceError, match="layer 0 of pool 'kv' must be memory of a G"):
        CudaDevice.adopt(LAYOUT, tensors)


def test_memory_that_is_pinned_is_not_of_a_gpu(gpu, softcuda):
    ok(driver.cuInit(0))
    tensors = {"kv": torch.zeros(2, *KV.shape, dtype=torch.bfloat16)}
    tensors["state"] = gpu.pool(Lie.PAGE_FIRST, STATE, 2)
    with gpu.current():
        address = tensors["kv"].data_ptr()
        ok(driver.cuMemHostRegister(address, tensors["kv"].nbytes, 0))
        with pytest.raises(DeviceError, match="must be memory of a GPU"):
            CudaDevice.adopt(LAYOUT, tensors)
        ok(driver.cuMemHostUnregister(address))


def test_memory_of_another_gpu_is_refused(gpu, softcuda):
    softcuda.set_devices(2)
    tensors = {
        "kv": gpu.pool(Lie.PAGE_FIRST, KV, 2, ordinal=1),
        "state": gpu.pool(Lie.PAGE_FIRST, STATE, 2),
    }
    with pytest.raises(DeviceError, match="must be memory of GPU 0, not of 1"):
        CudaDevice.adopt(LAYOUT, tensors)


@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 2)])
def test_memory_that_is_only_in_part_of_a_gpu_is_refused(gpu, softcuda, part):
    kv = torch.zeros(2, *KV.shape, dtype=torch.bfloat16)
    softcuda.declare(kv[part])
    tensors = {"kv": kv, "state": gpu.pool(Lie.PAGE_FIRST, STATE, 2)}
    with pytest.raises(DeviceError, match="layer 0 of pool 'kv' must be memory of a G"):
        CudaDevice.adopt(LAYOUT, tensors)
    softcuda.undeclare(kv[part])
