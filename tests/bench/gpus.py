"""What CUDA benchmarks run on: a GPU, or softcuda where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from cuda.bindings import driver

from asyncache.core import DeviceError, KVLayout
from asyncache.devices import CudaDevice, PageOrder
from asyncache.devices._pool import TORCH_DTYPES
from tests.softcuda import LIBRARY, SoftCuda, driver_line, load


class Gpu:
    """A GPU, whose devices are opened alike on either driver.

    Attributes:
        soft: The software driver; None where the GPU is real.
        name: What it calls itself, and its driver.
    """

    def __init__(self, soft: SoftCuda | None) -> None:
        self.soft = soft
        self.name = driver_line().removeprefix("CUDA: ")

    def open(
        self,
        layout: KVLayout,
        num_pages: int,
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        waits: Literal["fences", "words"] = "fences",
    ) -> CudaDevice:
        """Open a device of zeros. On softcuda, CPU tensors play its memory."""
        if self.soft is None:
            return CudaDevice(layout, num_pages, order=order, waits=waits)
        tensors = {
            pool.name: self._tensor(layout, pool, num_pages, order)
            for pool in layout.pools
        }
        return CudaDevice.adopt(layout, tensors, order=order, waits=waits)

    def _tensor(
        self, layout: KVLayout, pool: object, num_pages: int, order: PageOrder
    ) -> torch.Tensor:
        space = layout.space(pool)
        leading = [num_pages, space.num_layers]
        if order is PageOrder.LAYER_FIRST:
            leading.reverse()
        shape = [*leading, *space.shape[1:]]
        tensor = torch.zeros(shape, dtype=TORCH_DTYPES[space.dtype])
        # For good: the benchmarks are short, and softcuda ends with the process.
        self.soft.declare(tensor)
        _declared.append(tensor)
        return tensor

    @contextmanager
    def slow_copies(self, latency_s: float) -> Iterator[None]:
        """Have each copy take a while, as on a GPU it does by itself."""
        if self.soft is None:
            yield
            return
        self.soft.set_pace(latency_s=latency_s)
        try:
            yield
        finally:
            self.soft.set_pace()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context current in this thread, for bare calls."""
        device = check(driver.cuDeviceGet(0))
        context = check(driver.cuDevicePrimaryCtxRetain(device))
        check(driver.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent())
            check(driver.cuDevicePrimaryCtxRelease(device))


_declared: list[torch.Tensor] = []


def has_driver() -> bool:
    """Whether a CUDA driver is installed; softcuda, once loaded, looks like one."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def pick_gpu() -> Gpu:
    """Return the GPU, or softcuda where there is no driver of one.

    Raises:
        DeviceError: If there is a driver, and no GPU that it can use.
        NoCompilerError: If there is neither a driver nor a gcc to build softcuda.
    """
    gpu = Gpu(load())
    check(driver.cuInit(0))
    if gpu.soft is None:
        torch.zeros(1, device="cuda")  # torch makes its context before we time ours
    return gpu


def check(result: tuple[object, ...]) -> object:
    """Return what a bare call of the driver returned behind its code.

    Raises:
        DeviceError: If it failed.
    """
    code, *values = result
    if code:
        raise DeviceError(f"the driver returned {code}")
    return values[0] if values else None
