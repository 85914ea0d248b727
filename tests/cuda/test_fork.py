"""CUDA does not survive a fork: the child is refused everything, and harms nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
import warnings

import pytest

from asyncache.core import DeviceError
from asyncache.devices import CudaDevice
from tests.cuda.scene import LAYOUT, content, held


def in_child(check):
    """Run a check in a forked child; it must not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            check()
        except BaseException:  # noqa: BLE001 - the child ends here, whatever it is
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_child_is_refused_everything_and_the_parent_goes_on(gpu, softcuda):
    device = gpu.device(waits="words")
    word, stream = device.new_word(), gpu.stream()
    memory = asyncio.run(device.allocate_staging(10))
    calls = []

    def check():
        refused = "opened in process .* does not survive a fork"
        for begin in (
            lambda: device.start_write("kv", [1], memoryview(content())),
            lambda: device.start_read("kv", [1], memoryview(content())),
            lambda: device.copy_pages("kv", [1], [2]),
            lambda: word.hold(stream, 1),
            lambda: word.raise_behind(1),
        ):
            with pytest.raises(DeviceError, match=refused):
                begin()
        with pytest.raises(DeviceError, match=refused):
            asyncio.run(device.allocate_staging(10))
        with pytest.raises(DeviceError, match="NOT_INITIALIZED"):
            CudaDevice(LAYOUT, 2)
        device.when_done(stream, lambda: calls.append(1))
        assert calls == [1]
        assert device.new_word() is None
        word.set(1)
        word.release()
        assert "CudaDevice" in repr(device)
        asyncio.run(device.free_staging(memory))
        asyncio.run(device.aclose())
        asyncio.run(device.aclose())

    in_child(check)

    async def go_on():
        await device.write_pages("kv", [1], memoryview(content()))
        assert held(device, [1]) == content()
        word.hold(stream, 1)
        word.set(1)
        word.release()
        await device.aclose()

    asyncio.run(go_on())
