"""The CUDA driver, as far as a device needs it: what fails is a DeviceError.

Calls go through ``cuda.bindings.driver``, which lets go of the GIL, raises nothing and
returns its results behind a code. No host function is ever given to the driver: Python
must not run on its threads.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from cuda.bindings import driver as cuda

from asyncache.core import DeviceError

__all__ = [
    "NOT_READY",
    "SHARED_STREAMS",
    "SUCCESS",
    "Context",
    "check",
    "code_of",
    "cuda",
    "describe",
]

SUCCESS = int(cuda.CUresult.CUDA_SUCCESS)
NOT_READY = int(cuda.CUresult.CUDA_ERROR_NOT_READY)

# A call's own fault: its stream is none or records a graph, or there is no room just
# now. The context goes on; any other error of what ran on the GPU has killed it.
_LOCAL = {
    int(cuda.CUresult.CUDA_ERROR_INVALID_VALUE),
    int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
    int(cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT),
    int(cuda.CUresult.CUDA_ERROR_INVALID_HANDLE),
    int(cuda.CUresult.CUDA_ERROR_NOT_PERMITTED),
    int(cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED),
    *(int(code) for code in cuda.CUresult if "CAPTURE" in code.name),
}

_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

# What torch and the driver call the legacy stream and its likes, which are everybody's.
SHARED_STREAMS = (0, 1, 2)


def describe(code: int) -> str:
    """Return an error's name and what it means."""
    try:
        result = cuda.CUresult(code)
    except ValueError:
        return f"error {code}, which these bindings do not know"
    name, text = cuda.cuGetErrorName(result)[1], cuda.cuGetErrorString(result)[1]
    return f"{_text(name) or code}: {_text(text)}"


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode()


def code_of(result: tuple[Any, ...]) -> int:
    """Return the code of a call that returns no more."""
    return int(result[0])


def check(result: tuple[Any, ...], what: str) -> int:
    """Return what a call returned behind its code: a handle or a number.

    Raises:
        DeviceError: If it failed; ``what`` says what could not be done.
    """
    code, *values = result
    if code != SUCCESS:
        raise DeviceError(f"{what}: {describe(int(code))}")
    return int(values[0]) if values else 0


class Context:
    """The primary context of one GPU, which torch uses too.

    As ``with context:`` it is current in this thread until the block is left; what was
    current before is again afterwards.

    Args:
        ordinal: Which GPU.

    Attributes:
        failure: Why nothing runs in it any more; None while it works.

    Raises:
        DeviceError: If there is no driver, or no such GPU.
    """

    def __init__(self, ordinal: int) -> None:
        _initialize()
        count = check(cuda.cuDeviceGetCount(), "the GPUs could not be counted")
        if not 0 <= ordinal < count:
            raise DeviceError(f"ordinal must be in [0, {count}), not {ordinal}")
        self.ordinal = ordinal
        self.failure: DeviceError | None = None
        self._process = os.getpid()
        self._device = check(cuda.cuDeviceGet(ordinal), f"no GPU {ordinal}")
        self._handle = check(
            cuda.cuDevicePrimaryCtxRetain(self._device), f"no context on GPU {ordinal}"
        )

    @property
    def is_of_this_process(self) -> bool:
        """Whether it works here: CUDA does not survive a fork."""
        return os.getpid() == self._process

    def check_usable(self) -> None:
        """Raise DeviceError unless work may be given to it, here and now."""
        if not self.is_of_this_process:
            raise DeviceError(
                f"the device was opened in process {self._process}, and CUDA does not "
                f"survive a fork: open another in process {os.getpid()}, not forked"
            )
        if self.failure is not None:
            raise DeviceError(str(self.failure))

    def make_current(self) -> None:
        """Make it current in a thread of our own, for good, which only waits."""
        # If it fails, so will whatever the thread asks next, and that is told.
        self.judge(code_of(cuda.cuCtxSetCurrent(self._handle)))
        # While another thread records a graph, to wait for an event of ours would be an
        # error otherwise, here and in the graph.
        cuda.cuThreadExchangeStreamCaptureMode(_RELAXED)

    def __enter__(self) -> Self:
        if error := self.judge(code_of(cuda.cuCtxPushCurrent(self._handle))):
            raise error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cuda.cuCtxPopCurrent()

    def judge(self, code: int) -> DeviceError | None:
        """Return what it means that a wait for a stream ended with a code.

        As a rule that an error killed the context. It is asynchronous, comes from
        whatever ran before, and is sticky: every later call returns it, until the
        process ends.
        """
        if code in (SUCCESS, NOT_READY):
            return None
        if code in _LOCAL:
            return DeviceError(f"GPU {self.ordinal} did not do it: {describe(code)}")
        if self.failure is None:
            self.failure = DeviceError(
                f"GPU {self.ordinal} is lost to this process: {describe(code)}"
            )
        return self.failure

    def judge_refusal(self, code: int, stream: int, what: str) -> DeviceError:
        """Return what it means that something could not be enqueued on a stream.

        As a rule it is that call's own affair, and the context goes on; unless it was
        dead already, which the stream tells.
        """
        state = code_of(cuda.cuStreamQuery(stream))
        if state not in _LOCAL:
            self.judge(state)
        return self.failure or DeviceError(f"{what}: {describe(code)}")

    def retain(self) -> None:
        """Take another share of it, for a thread that may outlive the device.

        Raises:
            DeviceError: If it is gone.
        """
        what = f"no context on GPU {self.ordinal}"
        check(cuda.cuDevicePrimaryCtxRetain(self._device), what)

    def release(self) -> None:
        """Give one share of it back; torch keeps it for as long as it needs it."""
        cuda.cuDevicePrimaryCtxRelease(self._device)


def _initialize() -> None:
    try:
        result = cuda.cuInit(0)
    except RuntimeError as error:
        # What the bindings raise without a driver, each release another subclass.
        raise DeviceError(f"there is no CUDA driver: {error}") from error
    check(result, "the CUDA driver is of no use here")
