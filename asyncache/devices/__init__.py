"""Pools of pages on an accelerator, and the copies into and out of them."""

from __future__ import annotations

from asyncache.devices._abc import Device
from asyncache.devices._copy import Copy, Fence, Word
from asyncache.devices._cpu import CpuDevice
from asyncache.devices._cuda import CudaDevice
from asyncache.devices._memory import Span, Whereabouts
from asyncache.devices._pool import PageOrder

__all__ = [
    "Copy",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Fence",
    "PageOrder",
    "Span",
    "Whereabouts",
    "Word",
]
