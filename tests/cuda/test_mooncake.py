"""Memory of a GPU, which Mooncake moves where it is: no host memory is in between.

The software driver's device memory is the host's, so that Mooncake's CPU build reaches
it. Nothing else here may look at it.
"""

from __future__ import annotations

import pytest

from asyncache.core import DeviceError
from tests.cuda.rig import gpu
from tests.engine.scene import PAGE, content, keys, prompt, scene
from tests.linkers.mooncake_server import bare_client, running_master, running_node
from tests.linkers.worlds import MooncakeWorld

TOKENS = prompt(3)


@pytest.fixture(scope="module")
def client():
    with running_master() as master, running_node(master), bare_client(master) as lent:
        yield lent


async def test_pages_of_a_gpu_are_moved_where_they_are(softcuda, client):
    world = MooncakeWorld(client)
    for expected in (0, 3 * PAGE):
        async with gpu(softcuda) as device:
            with pytest.raises(DeviceError, match="not addressable by the host"):
                device.page_views("kv", [0])
            async with scene(device=device, linker=world.link) as view:
                assert await view.serve(TOKENS) == expected
        assert softcuda.count("cuMemcpyBatchAsync") == 0
        assert softcuda.count("cuMemcpyAsync") == 0
    name = f"{world.prefix}:bare-1:{keys(TOKENS)[0].name}"
    assert client.get(name) == content(TOKENS, 0)
