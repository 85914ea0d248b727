"""Calls of the driver, through the bindings and at the addresses that it gives."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from threading import Thread

import torch
from cuda.bindings import driver

PATIENCE_S = 10.0
Code = driver.CUresult
NON_BLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
DISABLE_TIMING = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
OLD, NEW = 1, 2


def ok(returned):
    """Return what a call that succeeded returned: nothing, a value, or several."""
    code, *values = returned
    assert code == Code.CUDA_SUCCESS, code
    return values[0] if len(values) == 1 else values


def make_current(ordinal):
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(ordinal))))
    ok(driver.cuCtxSetCurrent(context))
    return context


def new_stream():
    return ok(driver.cuStreamCreate(NON_BLOCKING))


def new_event(flags=DISABLE_TIMING):
    return ok(driver.cuEventCreate(flags))


def record(stream):
    event = new_event()
    ok(driver.cuEventRecord(event, stream))
    return event


def entry(name, version=12080):
    """Return a function's address."""
    address, _ = ok(driver.cuGetProcAddress(name.encode(), version, 0))
    return address


def call(name, *arguments, version=12080):
    """Call a function at its address, where the GIL is released."""
    kinds = [type(argument) for argument in arguments]
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(entry(name, version))
    return Code(function(*arguments))


def filled(num_bytes, value):
    return torch.full((num_bytes,), value, dtype=torch.uint8)


class Buffers:
    """A page of the device, all OLD, and pinned memory, all NEW, both torch tensors."""

    def __init__(self, softcuda, num_bytes=64):
        self.num_bytes = num_bytes
        self.page = filled(num_bytes, OLD)
        self.host = filled(num_bytes, NEW)
        softcuda.declare(self.page)
        ok(driver.cuMemHostRegister(self.host.data_ptr(), num_bytes, 0))

    def load(self, stream, num_bytes=None):
        return driver.cuMemcpyHtoDAsync(
            self.page.data_ptr(),
            self.host.data_ptr(),
            num_bytes or self.num_bytes,
            stream,
        )

    def offload(self, stream):
        return driver.cuMemcpyDtoHAsync(
            self.host.data_ptr(), self.page.data_ptr(), self.num_bytes, stream
        )


def is_all(tensor, value):
    return bool((tensor == value).all())


@contextmanager
def waiting(context, event):
    """Have a thread wait for an event; what it was told is in the list."""
    told = []

    def wait():
        ok(driver.cuCtxSetCurrent(context))
        told.extend(driver.cuEventSynchronize(event))

    thread = Thread(target=wait)
    thread.start()
    yield told
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
