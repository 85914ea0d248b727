"""Pinned memory: made in pieces, given back in whole."""

from __future__ import annotations

import pytest

from asyncache.core import DeviceError
from tests.cuda.scene import OUT_OF_MEMORY

CHUNK_BYTES = 4096


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr("asyncache.devices._cuda_pinned._CHUNK_BYTES", CHUNK_BYTES)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("nth", range(1, 5))
async def test_memory_that_cannot_be_pinned_leaves_nothing_pinned(gpu, softcuda, nth):
    device = gpu.device()
    softcuda.refuse("cuMemHostRegister", OUT_OF_MEMORY, nth=nth)
    with pytest.raises(
        DeviceError, match=r"12289 bytes .* not be pinned: .*OUT_OF_MEM"
    ):
        await device.allocate_staging(3 * CHUNK_BYTES + 1)
    assert softcuda.count("cuMemHostRegister") == nth
    assert softcuda.count("registered_ranges") == 0
    memory = await device.allocate_staging(3 * CHUNK_BYTES + 1)
    assert softcuda.count("registered_ranges") == 4
    await device.free_staging(memory)
    assert softcuda.count("registered_ranges") == 0
    await device.aclose()


async def test_memory_is_given_back_once(gpu, softcuda):
    device = gpu.device()
    memory = await device.allocate_staging(10)
    foreign = memoryview(bytearray(10))
    await device.free_staging(foreign)
    assert softcuda.count("registered_ranges") == 1
    for _ in range(2):
        await device.free_staging(memory)
    assert softcuda.count("cuMemHostUnregister") == 1
    await device.aclose()
    await device.free_staging(memory)


@pytest.mark.parametrize("num_bytes", [0, -1])
async def test_nothing_is_no_memory(gpu, num_bytes):
    device = gpu.device()
    with pytest.raises(ValueError, match=f"must be at least 1, not {num_bytes}"):
        await device.allocate_staging(num_bytes)
    await device.aclose()
