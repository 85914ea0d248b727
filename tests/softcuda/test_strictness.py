"""What the software driver refuses, and how it fails."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

import pytest
from cuda.bindings import driver

from tests.softcuda import NoCompilerError
from tests.softcuda._build import build
from tests.softcuda.calls import (
    NEW,
    OLD,
    PATIENCE_S,
    Buffers,
    Code,
    call,
    entry,
    filled,
    is_all,
    make_current,
    new_event,
    new_stream,
    ok,
    record,
    waiting,
)

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent
ILLEGAL = (Code.CUDA_ERROR_ILLEGAL_ADDRESS,)
LIBC = ctypes.CDLL(None)


@pytest.fixture
def stream(context):
    return new_stream()


@pytest.fixture
def buffers(softcuda, context):
    return Buffers(softcuda)


@pytest.fixture
def two_contexts(softcuda):
    """The contexts of two devices; the second is current."""
    softcuda.set_devices(2)
    return make_current(0), make_current(1)


def alone(code):
    """Run code in a process of its own, and return what it printed."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


# Codes and constants are the bindings' own.


def test_codes_are_those_of_the_bindings(softcuda):
    text = (SOURCES / "softcuda.h").read_text()
    codes = re.findall(r"X\((CUDA_\w+), (\d+)", text)
    assert len(codes) == 20
    for name, code in codes:
        assert int(getattr(Code, name)) == int(code)
        told = ok(driver.cuGetErrorName(getattr(Code, name)))
        assert told.decode() == name
        assert ok(driver.cuGetErrorString(getattr(Code, name)))
    unknown = driver.cuGetErrorName(Code.CUDA_ERROR_PROFILER_DISABLED)
    assert unknown[0] == Code.CUDA_ERROR_INVALID_VALUE


def test_attributes_are_those_of_the_bindings(softcuda, context):
    text = (SOURCES / "driver.c").read_text()
    numbers = re.findall(r"case (\d+): /\* (\w+) \*/", text)
    assert len(numbers) == 6
    for number, name in numbers:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        assert int(attribute) == int(number)
        assert ok(driver.cuDeviceGetAttribute(attribute, 0)) > 0
    other = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
    assert ok(driver.cuDeviceGetAttribute(other, 0)) == 0


# Refused calls.


def test_the_nth_call_is_refused_and_does_nothing(softcuda, stream, buffers):
    softcuda.refuse("cuMemcpyHtoDAsync", Code.CUDA_ERROR_OUT_OF_MEMORY, nth=2)
    ok(buffers.load(stream))
    ok(driver.cuStreamSynchronize(stream))
    buffers.page[:] = OLD
    assert buffers.load(stream) == (Code.CUDA_ERROR_OUT_OF_MEMORY,)
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.page, OLD)
    ok(buffers.load(stream))


def test_only_what_is_there_can_be_refused_or_poisoned(softcuda):
    with pytest.raises(ValueError, match="there is no cuMemcpyHtoAsync"):
        softcuda.refuse("cuMemcpyHtoAsync", Code.CUDA_ERROR_UNKNOWN)
    with pytest.raises(ValueError, match="cuMemAlloc enqueues nothing"):
        softcuda.poison("cuMemAlloc", Code.CUDA_ERROR_UNKNOWN)


# A context that dies.


def test_a_poisoned_copy_kills_the_context_halfway(softcuda, stream, buffers):
    softcuda.poison("cuMemcpyHtoDAsync", ILLEGAL[0], nth=2)
    ok(buffers.load(stream))
    good = record(stream)
    ok(driver.cuEventSynchronize(good))
    buffers.page[:] = OLD
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        bad = record(stream)
        gate.wait_held()
        ok(driver.cuEventQuery(good))
    assert driver.cuEventSynchronize(bad) == ILLEGAL
    assert is_all(buffers.page[:32], NEW)
    assert is_all(buffers.page[32:], OLD)
    for returned in (
        driver.cuEventQuery(good),
        driver.cuStreamQuery(stream),
        driver.cuStreamSynchronize(stream),
        driver.cuCtxSynchronize(),
        driver.cuMemAlloc(1)[:1],
        driver.cuDevicePrimaryCtxRetain(0)[:1],
        buffers.load(stream),
    ):
        assert returned == ILLEGAL


def test_what_waits_learns_that_the_context_is_dead(softcuda, context, buffers):
    stream, other = new_stream(), new_stream()
    softcuda.poison("cuMemsetD8Async", ILLEGAL[0])
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        gate.wait_held()
        with waiting(context, record(stream)) as told:
            softcuda.wait_calls("cuEventSynchronize")
            ok(driver.cuMemsetD8Async(buffers.page.data_ptr(), 3, 64, other))
    assert told == list(ILLEGAL)
    assert is_all(buffers.page[32:], OLD)


@pytest.mark.parametrize("api", ["cuEventRecord", "cuStreamWaitEvent"])
def test_whatever_a_stream_carries_out_may_fail(softcuda, stream, api):
    event = record(stream)
    ok(driver.cuEventSynchronize(event))
    softcuda.poison(api, Code.CUDA_ERROR_ECC_UNCORRECTABLE)
    if api == "cuEventRecord":
        ok(driver.cuEventRecord(event, stream))
        returned = driver.cuEventSynchronize(event)
    else:
        ok(driver.cuStreamWaitEvent(stream, event, 0))
        returned = driver.cuStreamSynchronize(stream)
    assert returned == (Code.CUDA_ERROR_ECC_UNCORRECTABLE,)


def test_a_poisoned_copy_that_is_waited_for_returns_its_error(softcuda, buffers):
    softcuda.poison("cuMemcpyHtoD", ILLEGAL[0])
    page, host = buffers.page.data_ptr(), buffers.host.data_ptr()
    assert driver.cuMemcpyHtoD(page, host, 64) == ILLEGAL


def test_a_dead_context_takes_back_what_it_gave(softcuda, stream, buffers):
    event, page = record(stream), ok(driver.cuMemAlloc(64))
    softcuda.poison("cuMemcpyHtoDAsync", ILLEGAL[0])
    ok(buffers.load(stream))
    assert driver.cuStreamSynchronize(stream) == ILLEGAL
    assert driver.cuEventDestroy(event) == ILLEGAL
    assert driver.cuStreamDestroy(stream) == ILLEGAL
    assert driver.cuMemFree(page) == ILLEGAL
    assert driver.cuMemHostUnregister(buffers.host.data_ptr()) == ILLEGAL
    softcuda.undeclare(buffers.page)
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert softcuda.leftovers() == {}


def test_a_dead_context_leaves_the_other_alone(softcuda, two_contexts):
    first, second = two_contexts
    buffers, stream = Buffers(softcuda), new_stream()
    softcuda.poison("cuMemcpyHtoDAsync", ILLEGAL[0])
    ok(buffers.load(stream))
    assert driver.cuStreamSynchronize(stream) == ILLEGAL
    ok(driver.cuCtxSetCurrent(first))
    ok(driver.cuStreamSynchronize(new_stream()))
    ok(driver.cuCtxSetCurrent(second))
    assert driver.cuStreamCreate(0)[:1] == ILLEGAL


# Bounds.


def test_a_copy_beyond_what_was_declared_is_an_illegal_address(
    softcuda, stream, buffers
):
    ok(buffers.load(stream, num_bytes=65))
    assert driver.cuStreamSynchronize(stream) == ILLEGAL
    assert is_all(buffers.page, OLD)


def test_memory_must_stay_until_its_copy_has_ended(softcuda, stream, buffers):
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        gate.wait_held()
        ok(driver.cuMemHostUnregister(buffers.host.data_ptr()))
    assert driver.cuStreamSynchronize(stream) == ILLEGAL
    assert is_all(buffers.page[32:], OLD)


# Handles and contexts.


def test_a_thread_has_no_context_until_it_is_given_one(softcuda, stream, buffers):
    event = new_event()
    codes = []

    def try_all():
        codes.extend(buffers.load(stream))
        codes.extend(driver.cuEventQuery(event))
        codes.extend(driver.cuEventSynchronize(event))
        codes.append(driver.cuStreamCreate(0)[0])
        codes.extend(driver.cuCtxSynchronize())

    thread = Thread(target=try_all)
    thread.start()
    thread.join(PATIENCE_S)
    assert codes == [Code.CUDA_ERROR_INVALID_CONTEXT] * 5


def test_new_work_is_refused_under_the_context_of_another_device(
    softcuda, two_contexts
):
    first, _ = two_contexts
    buffers, stream, event = Buffers(softcuda), new_stream(), new_event()
    ok(driver.cuCtxSetCurrent(first))
    own_stream, own_event = new_stream(), new_event()
    assert buffers.load(stream) == (Code.CUDA_ERROR_INVALID_CONTEXT,)
    assert driver.cuEventRecord(event, stream) == (Code.CUDA_ERROR_INVALID_CONTEXT,)
    for mixed in ((event, own_stream), (own_event, stream)):
        assert driver.cuEventRecord(*mixed) == (Code.CUDA_ERROR_INVALID_HANDLE,)


def test_a_thread_may_wait_under_the_context_of_another_device(softcuda, two_contexts):
    first, _ = two_contexts
    buffers, stream = Buffers(softcuda), new_stream()
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        event = record(stream)
        ok(driver.cuCtxSetCurrent(first))
        gate.wait_held()
        assert driver.cuEventQuery(event) == (Code.CUDA_ERROR_NOT_READY,)
        ok(driver.cuStreamWaitEvent(own := new_stream(), event, 0))
        assert driver.cuStreamQuery(own) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamSynchronize(own))
    ok(driver.cuStreamSynchronize(stream))


def test_a_handle_that_was_destroyed_or_never_was_is_refused(softcuda, stream):
    event, gone = new_event(), new_event()
    ok(driver.cuEventDestroy(gone))
    refused = (Code.CUDA_ERROR_INVALID_HANDLE,)
    for wrong in (gone, stream, 0, 12345, 2**48):
        assert driver.cuEventQuery(int(wrong)) == refused
        assert driver.cuEventRecord(int(wrong), stream) == refused
        assert driver.cuEventDestroy(int(wrong)) == refused
    for wrong in (event, 12345, 2**48):
        assert driver.cuStreamQuery(int(wrong)) == refused
        assert driver.cuEventRecord(event, int(wrong)) == refused
        assert driver.cuStreamDestroy(int(wrong)) == refused
    ok(driver.cuStreamDestroy(stream))
    assert driver.cuStreamQuery(stream) == refused


def test_a_stream_that_is_destroyed_ends_its_work(softcuda, context, buffers):
    stream = new_stream()
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        event = record(stream)
        gate.wait_held()
        ok(driver.cuStreamDestroy(stream))
        assert driver.cuEventQuery(event) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuEventSynchronize(event))
    assert is_all(buffers.page, NEW)


def test_flags_that_mean_nothing_are_refused(stream):
    refused = Code.CUDA_ERROR_INVALID_VALUE
    assert driver.cuInit(1)[0] == refused
    assert driver.cuStreamCreate(2)[0] == refused
    assert driver.cuEventCreate(8)[0] == refused
    assert driver.cuStreamWaitEvent(stream, new_event(), 1)[0] == refused


# Host functions, at their address: the bindings would take the GIL.


class Semaphore:
    """What C functions of one argument can tell a test, and it them."""

    def __init__(self):
        self.memory = ctypes.create_string_buffer(64)
        LIBC.sem_init(self.memory, 0, 0)

    def launch(self, function, stream):
        address = ctypes.cast(getattr(LIBC, function), ctypes.c_void_p)
        return launch(stream, address, ctypes.addressof(self.memory))

    def post(self):
        LIBC.sem_post(self.memory)

    def wait(self):
        LIBC.sem_wait(self.memory)

    def was_posted(self):
        return LIBC.sem_trywait(self.memory) == 0


def launch(stream, address, argument):
    handle = ctypes.c_void_p(int(stream))
    return call("cuLaunchHostFunc", handle, address, ctypes.c_void_p(argument))


def test_a_host_function_runs_in_the_order_of_its_stream(softcuda, stream, buffers):
    semaphore = Semaphore()
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        assert semaphore.launch("sem_post", stream) == Code.CUDA_SUCCESS
        gate.wait_held()
        assert not semaphore.was_posted()
    ok(driver.cuStreamSynchronize(stream))
    assert semaphore.was_posted()
    assert softcuda.count("host_functions_run") == 1


def test_a_dead_context_runs_no_host_function(softcuda, stream, buffers):
    semaphore = Semaphore()
    softcuda.poison("cuMemcpyHtoDAsync", ILLEGAL[0])
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        gate.wait_held()
        assert semaphore.launch("sem_post", stream) == Code.CUDA_SUCCESS
    assert driver.cuStreamSynchronize(stream) == ILLEGAL
    softcuda.reset()  # which lets the stream come to its end
    assert not semaphore.was_posted()


def test_a_host_function_must_not_call_the_driver(softcuda, stream):
    version = ctypes.c_int(0)
    address = ctypes.c_void_p(entry("cuDriverGetVersion"))
    assert launch(stream, address, ctypes.addressof(version)) == Code.CUDA_SUCCESS
    ok(driver.cuStreamSynchronize(stream))
    assert softcuda.count("host_functions_run") == 1
    assert version.value == 0
    assert ok(driver.cuDriverGetVersion()) == 13000


def test_the_driver_may_be_locked_while_a_host_function_runs(softcuda, stream):
    begun, end = Semaphore(), Semaphore()
    order = []

    def ask():
        ok(driver.cuDriverGetVersion())
        order.append("answered")

    with softcuda.locked_host_functions(), softcuda.gate() as gate:
        page = filled(64, OLD)
        softcuda.declare(page)
        ok(driver.cuMemcpyDtoDAsync(page.data_ptr(), page.data_ptr(), 64, stream))
        begun.launch("sem_post", stream)
        end.launch("sem_wait", stream)
        gate.open()
        begun.wait()
        thread = Thread(target=ask)
        thread.start()
        thread.join(0.05)
        order.append("ended")
        end.post()
        thread.join(PATIENCE_S)
    assert order == ["ended", "answered"]


# Versions.


def look_up(name, version):
    """Call cuGetProcAddress at its address; its code, and the status it gave."""
    address, status = ctypes.c_void_p(1), ctypes.c_int()
    code = call(
        "cuGetProcAddress",
        ctypes.c_char_p(name),
        ctypes.c_void_p(ctypes.addressof(address)),
        ctypes.c_int(version),
        ctypes.c_uint64(0),
        ctypes.c_void_p(ctypes.addressof(status)),
    )
    assert bool(address) == (code == Code.CUDA_SUCCESS)
    return code, status.value


def test_a_function_that_is_not_there_is_not_found(softcuda, context):
    found = driver.CUdriverProcAddressQueryResult
    missing = Code.CUDA_ERROR_NOT_FOUND
    no_symbol = found.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    too_old = found.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    assert look_up(b"cuLaunchKernel", 12080) == (missing, no_symbol)
    assert look_up(b"cuMemcpyBatchAsync", 12040) == (missing, too_old)
    assert look_up(b"cuMemcpyBatchAsync", 12080) == (Code.CUDA_SUCCESS, 0)
    with pytest.raises(RuntimeError, match="cuLaunchKernel"):
        driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)


def test_an_old_driver_has_no_batches(softcuda):
    softcuda.set_driver_version(12040)
    assert ok(driver.cuDriverGetVersion()) == 12040
    code, *_ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 12040, 0)
    assert code == Code.CUDA_ERROR_NOT_FOUND
    code, *_ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 12080, 0)
    assert code == Code.CUDA_ERROR_INVALID_VALUE


def test_the_bindings_find_no_batch_in_an_old_driver(softcuda):
    printed = alone("""
from tests.softcuda import load
load().set_driver_version(12040)
from cuda.bindings import driver
print(driver.cuInit(0)[0].name)
try:
    driver.cuMemcpyBatchAsync([], [], [], 0, [], [], 0, 0)
except RuntimeError:
    print("missing")
""")
    assert printed == ["CUDA_SUCCESS", "missing"]


# The process.


def test_nothing_works_in_the_child_of_a_fork(softcuda):
    printed = alone("""
import os
from tests.softcuda import load
load()
from cuda.bindings import driver
driver.cuInit(0)
_, context = driver.cuDevicePrimaryCtxRetain(0)
driver.cuCtxSetCurrent(context)
_, stream = driver.cuStreamCreate(0)
if child := os.fork():
    os.waitpid(child, 0)
    print(driver.cuStreamSynchronize(stream)[0].name)
else:
    codes = driver.cuInit(0) + driver.cuStreamQuery(stream)
    print(*(code.name for code in codes), flush=True)
    os._exit(0)
""")
    assert printed == ["CUDA_ERROR_NOT_INITIALIZED"] * 2 + ["CUDA_SUCCESS"]


def test_a_fork_before_the_first_call_is_harmless(softcuda):
    printed = alone("""
import os
from tests.softcuda import load
load()
from cuda.bindings import driver
if child := os.fork():
    os.waitpid(child, 0)
else:
    print(driver.cuInit(0)[0].name, flush=True)
    os._exit(0)
""")
    assert printed == ["CUDA_SUCCESS"]


def test_a_reset_ends_all_that_is_in_flight(softcuda, context, stream, buffers):
    word = filled(4, 0)
    softcuda.declare(word)
    other = new_stream()
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        ok(driver.cuStreamWaitValue32(other, word.data_ptr(), 1, 0))
        gate.wait_held()
        with waiting(context, record(other)) as told:
            softcuda.wait_calls("cuEventSynchronize")
            softcuda.reset()
    assert len(told) == 1
    assert softcuda.leftovers() == {}
    assert is_all(buffers.page[32:], OLD)
    assert driver.cuStreamQuery(stream) == (Code.CUDA_ERROR_NOT_INITIALIZED,)
    make_current(0)
    assert driver.cuStreamQuery(stream) == (Code.CUDA_ERROR_INVALID_HANDLE,)


def test_what_does_not_come_is_waited_for_no_longer_than_patience(
    softcuda, monkeypatch
):
    monkeypatch.setattr("tests.softcuda._controls.PATIENCE_S", 0.01)
    with (
        softcuda.gate() as gate,
        pytest.raises(TimeoutError, match="0 of 1 copies came to the gate"),
    ):
        gate.wait_held()
    with pytest.raises(TimeoutError, match="0 of 1 calls of cuInit"):
        softcuda.wait_calls("cuInit")


def test_the_library_is_built_once(softcuda):
    library = build()
    built_ns = library.stat().st_mtime_ns
    assert build() == library
    assert library.stat().st_mtime_ns == built_ns
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_without_a_compiler_it_says_so(softcuda, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match="needs gcc"):
        build()
