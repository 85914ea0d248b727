"""A software CUDA driver, for machines without a GPU: see softcuda.h."""

from __future__ import annotations

import ctypes
from functools import cache

from tests.softcuda._build import LIBRARY, NoCompilerError, build
from tests.softcuda._controls import Direction, Gate, SoftCuda

__all__ = [
    "LIBRARY",
    "Direction",
    "Gate",
    "NoCompilerError",
    "SoftCuda",
    "driver_line",
    "load",
    "why_not",
]


@cache
def load() -> SoftCuda | None:
    """Return the software driver, or None where there is a real one.

    Call it before the first call of the driver: the bindings take what is loaded.

    Raises:
        NoCompilerError: If there is neither a driver nor a gcc.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return SoftCuda(ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL))
    return None


def why_not() -> str | None:
    """Return why CUDA tests have nothing to run on; None if they have."""
    try:
        load()
    except NoCompilerError as error:
        return str(error)
    return None


def driver_line() -> str:
    """Return a line for pytest's header: what the CUDA tests run on."""
    try:
        softcuda = load()
    except NoCompilerError as error:
        return f"CUDA: none ({error})"
    if softcuda is not None:
        return "CUDA: softcuda (software driver, no GPU)"
    return f"CUDA: {_describe_device()}"


def _describe_device() -> str:
    from cuda.bindings import driver

    (error,) = driver.cuInit(0)
    if error:
        return f"no device ({error.name})"
    _, version = driver.cuDriverGetVersion()
    _, name = driver.cuDeviceGetName(64, 0)
    major, minor = version // 1000, version % 1000 // 10
    return f"{name.split(bytes(1))[0].decode()}, driver {major}.{minor}"
