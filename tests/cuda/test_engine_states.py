"""States that a stream copies between slots: in its order, or not at all."""

from __future__ import annotations

import pytest

from asyncache.core import AbortedError, DeviceError
from asyncache.engine import KVCache
from tests.cuda.rig import OUT_OF_MEMORY, gpu, model
from tests.engine.test_states import LAYOUT, PAGE, PROMPT, counts
from tests.softcuda import Direction

LONGER = [*PROMPT, 5, 6]
STATE_BYTES = LAYOUT.space(LAYOUT.pools[0]).page_bytes
EARLY, LATE = bytes([1] * STATE_BYTES), bytes([2] * STATE_BYTES)


def state_of(device, request):
    return device.tensor("state")[request.state_slot["state"]]


def keep_state(cache, device, model, tokens=PROMPT):
    """Compute a prompt and keep its state, then write on, all on a stream."""
    with cache.request(tokens) as request:
        request.extend(len(tokens))
        with cache.forward([request], stream=model.stream):
            model.write(state_of(device, request), EARLY)
            assert request.checkpoint(4 * PAGE, stream=model.stream)
            model.write(state_of(device, request), LATE)
            request.commit(len(tokens))


async def test_a_state_is_kept_and_taken_up_in_the_order_of_the_stream(softcuda):
    async with (
        gpu(softcuda, layout=LAYOUT) as device,
        KVCache(LAYOUT, device=device) as cache,
    ):
        with model(softcuda) as stream, softcuda.gate(Direction.OTHER) as gate:
            keep_state(cache, device, stream)
            with cache.request(LONGER) as request:
                hit = await (await request.restore()).wait()
                assert hit.num_tokens == 4 * PAGE
                request.extend(len(LONGER))
                with cache.forward([request], stream=stream.stream):
                    found = stream.read(state_of(device, request))
                gate.wait_held()
                gate.open()
                stream.run()
                assert bytes(found.numpy()) == EARLY
        await cache.drain()


async def test_a_state_that_could_not_be_kept_is_never_shared(softcuda):
    async with (
        gpu(softcuda, layout=LAYOUT) as device,
        KVCache(LAYOUT, device=device) as cache,
    ):
        with cache.request(PROMPT) as request:
            request.extend(len(PROMPT))
            with cache.forward([request]):
                softcuda.refuse("cuMemcpyAsync", OUT_OF_MEMORY)
                with pytest.raises(DeviceError, match="could not be copied"):
                    request.checkpoint(4 * PAGE)
                with pytest.raises(AbortedError):
                    request.commit(len(PROMPT))
        assert cache.match_nowait(LONGER) == 0


async def test_a_forward_that_cannot_begin_with_its_state_aborts_its_request(softcuda):
    async with (
        gpu(softcuda, layout=LAYOUT) as device,
        KVCache(LAYOUT, device=device) as cache,
    ):
        with model(softcuda) as stream:
            keep_state(cache, device, stream)
            stream.run()
            with cache.request(LONGER) as request, cache.request([1, 2]) as other:
                await (await request.restore()).wait()
                request.extend(len(LONGER))
                before = softcuda.count("cuMemcpyBatchAsync")
                softcuda.refuse("cuMemcpyBatchAsync", OUT_OF_MEMORY)
                with (
                    pytest.raises(DeviceError, match="could not be copied"),
                    cache.forward([request, other], stream=stream.stream),
                ):
                    raise AssertionError("the model would run over any state")
                assert softcuda.count("cuMemcpyBatchAsync") == before + 1
                with (
                    pytest.raises(AbortedError),
                    cache.forward([request], stream=stream.stream),
                ):
                    pass
                with cache.forward([other], stream=stream.stream):
                    other.extend(2)
        assert counts(cache).request == 0
