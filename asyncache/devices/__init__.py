"""Pools of pages on an accelerator, and the copies into and out of them."""

from __future__ import annotations

from asyncache.devices._abc import Device
from asyncache.devices._cpu import CpuDevice
from asyncache.devices._host_pool import PageOrder

__all__ = ["CpuDevice", "Device", "PageOrder"]
