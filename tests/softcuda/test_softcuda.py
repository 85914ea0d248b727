"""What the software driver promises, through the real bindings."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pytest
from cuda.bindings import driver

from tests.softcuda import Direction, driver_line, load
from tests.softcuda.calls import (
    NEW,
    OLD,
    Buffers,
    Code,
    call,
    is_all,
    make_current,
    new_event,
    new_stream,
    ok,
    record,
    waiting,
)

WAIT_EQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
WAIT_GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ


@pytest.fixture
def stream(context):
    return new_stream()


@pytest.fixture
def buffers(softcuda, context):
    return Buffers(softcuda)


def new_word(value=0):
    """A word of pinned memory."""
    address = ok(driver.cuMemHostAlloc(4, 0))
    word = ctypes.c_uint32.from_address(address)
    word.value = value
    return word


def address_of(word):
    return ctypes.addressof(word)


def test_the_header_says_that_there_is_no_gpu(softcuda):
    assert driver_line() == "CUDA: softcuda (software driver, no GPU)"
    assert load() is softcuda


# Copies.


def test_a_copy_in_flight_is_torn(softcuda, stream, buffers):
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        event = record(stream)
        gate.wait_held()
        assert driver.cuEventQuery(event) == (Code.CUDA_ERROR_NOT_READY,)
        assert is_all(buffers.page[:32], NEW)
        assert is_all(buffers.page[32:], OLD)
    ok(driver.cuEventSynchronize(event))
    assert is_all(buffers.page, NEW)
    assert driver.cuEventQuery(event) == (Code.CUDA_SUCCESS,)


def test_a_stream_keeps_its_order(softcuda, stream, buffers):
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        loaded = record(stream)
        buffers.host[:] = OLD
        ok(driver.cuMemsetD8Async(buffers.page.data_ptr(), 3, 64, stream))
        ok(buffers.offload(stream))
        gate.let_pass()
        gate.wait_held()
        ok(driver.cuEventSynchronize(loaded))
        assert is_all(buffers.page, 3)
        assert gate.num_held == 1
        assert driver.cuStreamQuery(stream) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.host, 3)
    ok(driver.cuStreamQuery(stream))


def test_a_gate_may_hold_one_direction_only(softcuda, context):
    loads, offloads = Buffers(softcuda), Buffers(softcuda)
    with softcuda.gate(Direction.HOST_TO_DEVICE) as gate:
        ok(loads.load(load_stream := new_stream()))
        ok(offloads.offload(offload_stream := new_stream()))
        gate.wait_held()
        ok(driver.cuStreamSynchronize(offload_stream))
        assert is_all(offloads.host, OLD)
        assert driver.cuStreamQuery(load_stream) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuCtxSynchronize())
    assert is_all(loads.page, NEW)


def test_a_gate_lets_pass_as_many_as_it_is_told(softcuda, context):
    streams = [new_stream() for _ in range(3)]
    buffers = [Buffers(softcuda) for _ in streams]
    with softcuda.gate() as gate:
        for stream, buffer in zip(streams, buffers, strict=True):
            ok(buffer.load(stream))
        gate.wait_held(3)
        gate.let_pass(2)
        assert gate.num_held == 1
        gate.open()
        ok(driver.cuCtxSynchronize())
    assert gate.num_held == 0


def test_synchronous_copies_wait(softcuda, buffers):
    page, host = buffers.page.data_ptr(), buffers.host.data_ptr()
    ok(driver.cuMemcpyHtoD(page, host, 64))
    assert is_all(buffers.page, NEW)
    other = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemcpyDtoD(other, page, 64))
    buffers.host[:] = 0
    ok(driver.cuMemcpyDtoH(host, other, 64))
    assert is_all(buffers.host, NEW)


@pytest.mark.parametrize("copy", ["cuMemcpyAsync", "cuMemcpyDtoDAsync"])
def test_a_copy_need_not_say_what_is_where(stream, buffers, copy):
    page, host = buffers.page.data_ptr(), buffers.host.data_ptr()
    ok(getattr(driver, copy)(page, host, 64, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.page, NEW)


def test_copies_take_the_time_that_they_are_given(softcuda, stream, buffers):
    softcuda.set_pace(latency_s=0.002, bytes_per_s=64_000)
    began_ns = time.monotonic_ns()
    ok(buffers.load(stream))
    event = record(stream)
    ok(driver.cuEventSynchronize(event))
    assert began_ns + 3_000_000 <= softcuda.event_done_ns(event) <= time.monotonic_ns()


# Batches.


def attributes(order="STREAM"):
    made = driver.CUmemcpyAttributes()
    name = f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}"
    made.srcAccessOrder = getattr(driver.CUmemcpySrcAccessOrder, name)
    return made


def pointers(tensor, num_pieces):
    step = tensor.nbytes // num_pieces
    starts = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, step)
    return [driver.CUdeviceptr(start) for start in starts]


def test_a_batch_is_one_copy_of_many_pieces(softcuda, stream, buffers):
    with softcuda.gate() as gate:
        ok(
            driver.cuMemcpyBatchAsync(
                pointers(buffers.page, 4),
                pointers(buffers.host, 4),
                [16] * 4,
                4,
                [attributes("STREAM"), attributes("ANY")],
                [0, 2],
                2,
                stream,
            )
        )
        gate.wait_held()
        torn = [NEW] * 8 + [OLD] * 8
        assert buffers.page.tolist() == torn * 4
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.page, NEW)
    assert softcuda.count("cuMemcpyBatchAsync") == softcuda.count("copies") == 1
    assert softcuda.count("batch_items") == 4


NOBODY = 7


def pointer_to(array):
    return ctypes.c_void_p(ctypes.addressof(array))


def raw_batch(buffers, stream, version, *, order=1, firsts=(0,), bad_source=False):
    """Call cuMemcpyBatchAsync at its address; its code, and which copy it refused."""
    page, host, step = buffers.page.data_ptr(), buffers.host.data_ptr(), 32
    targets = (ctypes.c_uint64 * 2)(page, page + step)
    sources = (ctypes.c_uint64 * 2)(host, 0 if bad_source else host + step)
    sizes = (ctypes.c_size_t * 2)(step, step)
    choices = (ctypes.c_int * 6 * len(firsts))(*[(order, 0, 0, 0, 0, 0)] * len(firsts))
    indices = (ctypes.c_size_t * len(firsts))(*firsts)
    refused = ctypes.c_size_t(NOBODY)
    code = call(
        "cuMemcpyBatchAsync",
        *map(pointer_to, (targets, sources, sizes)),
        ctypes.c_size_t(2),
        *map(pointer_to, (choices, indices)),
        ctypes.c_size_t(len(firsts)),
        *([pointer_to(refused)] if version < 13000 else []),
        ctypes.c_void_p(int(stream)),
        version=version,
    )
    return code, refused.value


@pytest.mark.parametrize(
    ("version", "refused"), [(12080, ctypes.c_size_t(-1).value), (13000, NOBODY)]
)
def test_both_forms_of_a_batch_are_there(stream, buffers, version, refused):
    assert raw_batch(buffers, stream, version) == (Code.CUDA_SUCCESS, refused)
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.page, NEW)


def test_the_older_form_says_which_copy_was_refused(stream, buffers):
    outcome = raw_batch(buffers, stream, 12080, bad_source=True)
    assert outcome == (Code.CUDA_ERROR_INVALID_VALUE, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"order": 0}, {"order": 4}, {"firsts": (1,)}, {"firsts": (0, 0)}, {"firsts": ()}],
)
def test_the_attributes_of_a_batch_are_checked(stream, buffers, wrong):
    code, _ = raw_batch(buffers, stream, 13000, **wrong)
    assert code == Code.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("legacy", [0, 1])
def test_a_batch_must_not_go_to_the_legacy_stream(buffers, legacy):
    code, _ = raw_batch(buffers, legacy, 13000)
    assert code == Code.CUDA_ERROR_INVALID_VALUE


# Events.


def test_an_event_that_was_never_recorded_holds_up_nobody(stream):
    event = new_event()
    ok(driver.cuEventQuery(event))
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamWaitEvent(stream, event, 0))
    ok(driver.cuStreamSynchronize(stream))


def test_an_event_means_its_last_record(softcuda, context, buffers):
    event, ahead, behind = new_event(), new_stream(), new_stream()
    ok(driver.cuEventRecord(event, ahead))
    ok(driver.cuStreamSynchronize(ahead))
    ok(driver.cuEventQuery(event))
    with softcuda.gate() as gate:
        ok(buffers.load(behind))
        ok(driver.cuEventRecord(event, behind))
        gate.wait_held()
        assert driver.cuEventQuery(event) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuEventSynchronize(event))


def test_a_stream_waits_for_an_event_of_another(softcuda, context, buffers):
    first, second = new_stream(), new_stream()
    word = new_word()
    with softcuda.gate() as gate:
        ok(buffers.load(first))
        ok(driver.cuStreamWaitEvent(second, record(first), 0))
        ok(driver.cuStreamWriteValue32(second, address_of(word), 1, 0))
        gate.wait_held()
        assert driver.cuStreamQuery(second) == (Code.CUDA_ERROR_NOT_READY,)
        assert word.value == 0
    ok(driver.cuStreamSynchronize(second))
    assert word.value == 1


def test_a_thread_that_waits_for_an_event_lets_others_run(
    softcuda, context, stream, buffers
):
    with softcuda.gate() as gate:
        ok(buffers.load(stream))
        with waiting(context, record(stream)) as told:
            # All this needs the GIL, which the thread would keep for ever.
            softcuda.wait_calls("cuEventSynchronize")
            assert told == []
            gate.open()
    assert told == [Code.CUDA_SUCCESS]


def test_a_lost_wake_lets_a_thread_wait_for_an_event_that_is_done(
    softcuda, context, stream
):
    event = record(stream)
    ok(driver.cuEventSynchronize(event))
    with contextlib.ExitStack() as held:
        held.enter_context(softcuda.lost_wakes())
        with waiting(context, event) as told:
            softcuda.wait_calls("cuEventSynchronize", 2)
            ok(driver.cuEventQuery(event))
            assert told == []
            held.close()
    assert told == [Code.CUDA_SUCCESS]


def test_the_time_between_events_is_told(softcuda, stream):
    start, end = new_event(0), new_event(0)
    ok(driver.cuEventRecord(start, stream))
    assert driver.cuEventElapsedTime(start, end)[0] == Code.CUDA_ERROR_INVALID_HANDLE
    ok(driver.cuEventRecord(end, stream))
    ok(driver.cuStreamSynchronize(stream))
    elapsed_ns = softcuda.event_done_ns(end) - softcuda.event_done_ns(start)
    elapsed_ms = ok(driver.cuEventElapsedTime(start, end))
    assert elapsed_ms == pytest.approx(elapsed_ns / 1e6, abs=1e-6)
    untimed = record(stream)
    assert driver.cuEventElapsedTime(start, untimed)[0] == (
        Code.CUDA_ERROR_INVALID_HANDLE
    )


# Values in memory.


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        (WAIT_GEQ, (0, 1, 1)),
        (WAIT_GEQ, (0, 5, 7)),
        (WAIT_GEQ, (0xFFFFFFFF, 1, 2)),  # one before zero: the order is a cycle
        (WAIT_EQ, (7, 5, 5)),
    ],
)
def test_a_stream_waits_until_the_host_has_stored_a_value(
    stream, buffers, flag, values
):
    before, wanted, after = values
    word = new_word(before)
    ok(driver.cuStreamWaitValue32(stream, address_of(word), wanted, flag))
    ok(buffers.load(stream))
    assert driver.cuStreamQuery(stream) == (Code.CUDA_ERROR_NOT_READY,)
    assert is_all(buffers.page, OLD)
    word.value = after
    ok(driver.cuStreamSynchronize(stream))
    assert is_all(buffers.page, NEW)


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [(WAIT_GEQ, 5, 5), (WAIT_GEQ, 6, 5), (WAIT_GEQ, 0, 0xFFFFFFFF), (WAIT_EQ, 5, 5)],
)
def test_a_stream_does_not_wait_for_a_value_that_is_there(stream, flag, value, wanted):
    word = new_word(value)
    ok(driver.cuStreamWaitValue32(stream, address_of(word), wanted, flag))
    ok(driver.cuStreamSynchronize(stream))


def test_a_stream_waits_for_a_value_that_another_writes(softcuda, context, buffers):
    word = new_word()
    reader, writer = new_stream(), new_stream()
    ok(driver.cuStreamWaitValue32(reader, address_of(word), 1, WAIT_GEQ))
    with softcuda.gate() as gate:
        ok(buffers.load(writer))
        ok(driver.cuStreamWriteValue32(writer, address_of(word), 1, 0))
        gate.wait_held()
        assert driver.cuStreamQuery(reader) == (Code.CUDA_ERROR_NOT_READY,)
    ok(driver.cuStreamSynchronize(reader))
    assert word.value == 1


def test_a_value_must_be_a_word_of_memory_that_is_known(stream):
    address = address_of(new_word())
    nowhere = ctypes.c_uint32()
    for wrong in (address + 2, address_of(nowhere)):
        refused = (Code.CUDA_ERROR_INVALID_VALUE,)
        assert driver.cuStreamWaitValue32(stream, wrong, 1, 0) == refused
        assert driver.cuStreamWriteValue32(stream, wrong, 1, 0) == refused


# Devices and contexts.


def test_without_a_device_there_is_no_driver_to_use(softcuda):
    softcuda.set_devices(0)
    assert driver.cuInit(0) == (Code.CUDA_ERROR_NO_DEVICE,)
    assert driver.cuDeviceGetCount()[0] == Code.CUDA_ERROR_NOT_INITIALIZED


def test_each_device_has_its_context(softcuda):
    softcuda.set_devices(2)
    first, second = make_current(0), make_current(1)
    assert int(first) != int(second)
    assert ok(driver.cuDeviceGetCount()) == 2
    assert int(ok(driver.cuCtxGetDevice())) == 1
    assert ok(driver.cuDeviceGetName(32, 1)).startswith(b"softcuda 1\0")
    assert driver.cuDeviceGet(2)[0] == Code.CUDA_ERROR_INVALID_DEVICE
    with pytest.raises(ValueError, match=r"count must be in \[0, 8\], not 9"):
        softcuda.set_devices(9)


def test_contexts_are_a_stack(softcuda):
    softcuda.set_devices(2)
    first, second = make_current(0), make_current(1)
    ok(driver.cuCtxPushCurrent(first))
    assert int(ok(driver.cuCtxGetCurrent())) == int(first)
    assert int(ok(driver.cuCtxPopCurrent())) == int(first)
    assert int(ok(driver.cuCtxGetCurrent())) == int(second)
    ok(driver.cuCtxSetCurrent(0))
    assert int(ok(driver.cuCtxGetCurrent())) == 0
    assert driver.cuCtxPopCurrent()[0] == Code.CUDA_ERROR_INVALID_CONTEXT


def test_a_context_lives_as_long_as_it_is_retained(softcuda, context):
    make_current(0)
    assert softcuda.count("retained_contexts") == 2
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuMemGetInfo())
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == [0, 1]
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == [0, 0]
    assert driver.cuMemGetInfo()[0] == Code.CUDA_ERROR_CONTEXT_IS_DESTROYED
    assert driver.cuDevicePrimaryCtxRelease(0) == (Code.CUDA_ERROR_INVALID_CONTEXT,)


def test_a_stream_knows_its_context_and_its_priority(context):
    least, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    assert greatest < least
    stream = ok(driver.cuStreamCreateWithPriority(1, greatest - 1))
    assert ok(driver.cuStreamGetPriority(stream)) == greatest
    assert int(ok(driver.cuStreamGetCtx(stream))) == int(context)


# Memory.


def test_a_pointer_says_what_it_is(softcuda):
    softcuda.set_devices(2)
    make_current(0)
    context = make_current(1)
    buffers = Buffers(softcuda)
    softcuda.undeclare(buffers.page)
    softcuda.declare(buffers.page, device=1)
    kind = driver.CUpointer_attribute

    def ask(attribute, pointer):
        return driver.cuPointerGetAttribute(attribute, pointer)

    inside = buffers.page.data_ptr() + 63
    assert ok(ask(kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside)) == (
        driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    )
    assert ok(ask(kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside)) == 1
    found = ok(ask(kind.CU_POINTER_ATTRIBUTE_CONTEXT, inside))
    assert int(found) == int(context)
    assert ok(ask(kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, buffers.host.data_ptr())) == (
        driver.CUmemorytype.CU_MEMORYTYPE_HOST
    )
    code, _ = ask(kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside + 1)
    assert code == Code.CUDA_ERROR_INVALID_VALUE


def test_memory_is_registered_once(softcuda, buffers):
    host = buffers.host.data_ptr()
    register, unregister = driver.cuMemHostRegister, driver.cuMemHostUnregister
    assert int(ok(driver.cuMemHostGetDevicePointer(host, 0))) == host
    assert register(host + 32, 64, 0) == (
        Code.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    )
    assert softcuda.count("registered_ranges") == 1
    ok(unregister(host))
    assert unregister(host) == (Code.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)


def test_pageable_memory_is_counted_and_may_be_refused(softcuda, stream, buffers):
    ok(driver.cuMemHostUnregister(buffers.host.data_ptr()))
    ok(buffers.load(stream))
    ok(driver.cuStreamSynchronize(stream))
    assert softcuda.count("pageable") == 1
    assert is_all(buffers.page, NEW)
    softcuda.refuse_pageable(Code.CUDA_ERROR_INVALID_VALUE)
    assert buffers.load(stream) == (Code.CUDA_ERROR_INVALID_VALUE,)


def test_memory_of_the_device_is_what_was_allocated_or_declared(
    softcuda, stream, buffers
):
    softcuda.undeclare(buffers.page)
    assert buffers.load(stream) == (Code.CUDA_ERROR_INVALID_VALUE,)
    assert buffers.offload(stream) == (Code.CUDA_ERROR_INVALID_VALUE,)
    with pytest.raises(ValueError, match="was not declared"):
        softcuda.undeclare(buffers.page)
    with pytest.raises(ValueError, match="memory is known"):
        softcuda.declare(buffers.host)


def test_free_memory_goes_down_and_up_again(context):
    free, total = ok(driver.cuMemGetInfo())
    page = ok(driver.cuMemAlloc(1 << 20))
    assert ok(driver.cuMemGetInfo()) == [free - (1 << 20), total]
    ok(driver.cuMemFree(page))
    assert ok(driver.cuMemGetInfo()) == [free, total]
    assert driver.cuMemFree(page) == (Code.CUDA_ERROR_INVALID_VALUE,)
    assert driver.cuMemAlloc(total + 1)[0] == Code.CUDA_ERROR_OUT_OF_MEMORY
    assert driver.cuMemAlloc(0)[0] == Code.CUDA_ERROR_INVALID_VALUE


# Counters.


def test_counters_are_back_at_zero_once_all_was_given_back(softcuda, stream, buffers):
    event, page = record(stream), ok(driver.cuMemAlloc(64))
    pinned = ok(driver.cuMemHostAlloc(64, 0))
    assert softcuda.leftovers() == dict.fromkeys(
        [
            "retained_contexts",
            "live_events",
            "live_streams",
            "live_allocations",
            "live_host_allocations",
            "registered_ranges",
            "declared_ranges",
        ],
        1,
    )
    ok(driver.cuEventDestroy(event))
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(page))
    ok(driver.cuMemFreeHost(pinned))
    ok(driver.cuMemHostUnregister(buffers.host.data_ptr()))
    softcuda.undeclare(buffers.page)
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert softcuda.leftovers() == {}


def test_calls_are_counted_by_name(softcuda, stream):
    assert softcuda.count("cuStreamCreate") == 1
    assert driver.cuStreamQuery(1234567)[0] == Code.CUDA_ERROR_INVALID_HANDLE
    assert softcuda.count("cuStreamQuery") == 1
    with pytest.raises(ValueError, match="there is no cuStreamQery"):
        softcuda.count("cuStreamQery")
    softcuda.reset()
    assert softcuda.count("cuStreamCreate") == 0
