"""RedisStore on a real cluster of three."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import pytest

from asyncache.stores import RedisStore, Status
from asyncache.testing import check_store
from asyncache.testing._samples import new_keys
from tests.servers import START_S, free_port
from tests.stores.redis_server import Server, running
from tests.stores.test_redis import get, put

HIT, MISS, UNAVAILABLE = Status.HIT, Status.MISS, Status.UNAVAILABLE
SLOTS = ("0", "5460"), ("5461", "10922"), ("10923", "16383")


@pytest.fixture
def cluster() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = []
        for _ in SLOTS:
            # The bus would be at 10,000 more, where there may be no port.
            bus = str(free_port())
            options = ["--cluster-enabled", "yes", "--cluster-port", bus]
            options += ["--cluster-require-full-coverage", "no"]
            options += ["--cluster-node-timeout", "60000"]
            servers.append((stack.enter_context(running(*options)), bus))
        for (server, _), slots in zip(servers, SLOTS, strict=True):
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", *slots) == b"+OK\r\n"
            for other, bus in servers:
                server.ask("CLUSTER", "MEET", "127.0.0.1", str(other.port), bus)
        deadline = time.monotonic() + 2 * START_S
        for server, _ in servers:
            while not knows_all(server):
                assert time.monotonic() < deadline, "the cluster does not come up"
                time.sleep(0.05)
        yield [server for server, _ in servers]


def knows_all(server: Server) -> bool:
    known = server.ask("CLUSTER", "SLOTS")
    is_up = b"cluster_state:ok" in server.ask("CLUSTER", "INFO")
    return is_up and all(last.encode() in known for _, last in SLOTS)


@pytest.mark.slow
async def test_pages_are_spread_over_a_cluster_and_one_that_dies_takes_only_its_own(
    cluster,
):
    keys = new_keys(48)
    await check_store(lambda: RedisStore(cluster[1].url, timeout_s=60))
    async with RedisStore(cluster[0].url, timeout_s=60) as store:
        assert await put(store, *keys) == [HIT] * 48
        assert await get(store, *keys) == [HIT] * 48
        assert await store.contains(keys) == [True] * 48
        for server in cluster:
            assert int(server.ask("DBSIZE")[1:-2]) > 0
        cluster[2].kill()
        statuses = await get(store, *keys)
        assert set(statuses) == {HIT, UNAVAILABLE}
        assert await get(store, *keys) == statuses
        await anyio.to_thread.run_sync(cluster[2].start)
        with anyio.fail_after(60):
            while set(await put(store, *keys)) != {HIT}:
                pass
        assert await get(store, *keys) == [HIT] * 48
