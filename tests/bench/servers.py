"""RedisStore beside bare sockets: the same bytes, the same server, as many threads."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asyncache.stores import PageBuffers, RedisStore
from tests.bench.measure import Row, Stopwatch, interleave_async
from tests.bench.pages import BATCH_BYTES, KIB, MIB, Pages
from tests.stores.redis_server import Server, binary, running

NUM_CONNECTIONS = 4
NUM_KEYS = 512


def run(num_rounds: int) -> Iterator[Row]:
    """Read and write pages of two sizes, and ask for many."""
    if binary() is None:
        print("no server to measure RedisStore with", file=sys.stderr)
        return
    with running("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru") as server:
        for page_bytes in (256 * KIB, 2 * MIB):
            with _Bench(server, page_bytes) as bench:
                yield from asyncio.run(bench.measure(num_rounds))


class _Bench(Pages):
    """Pages of one size on a server and in a device."""

    def __init__(self, server: Server, page_bytes: int) -> None:
        super().__init__(page_bytes, BATCH_BYTES // page_bytes)
        self._server = server
        self._pool = ThreadPoolExecutor(NUM_CONNECTIONS)
        self._bare: list[_Bare] = []

    async def measure(self, num_rounds: int) -> list[Row]:
        async with RedisStore(
            self._server.url, num_connections=NUM_CONNECTIONS, timeout_s=120
        ) as store:
            await store.put(self.keys, self.views)
            names = [store._name(key) for key in self.keys]
            head_bytes = store._shelf(self.keys[0].space).frame.head_bytes
            self._bare = [
                _Bare(self._server.port, head_bytes) for _ in range(NUM_CONNECTIONS)
            ]
            loads = await interleave_async(
                partial(self.read, store),
                partial(self._all, _Bare.get, names, NUM_CONNECTIONS),
                num_rounds=num_rounds,
            )
            stores = await interleave_async(
                partial(self.write, store),
                partial(self._all, _Bare.set, names, NUM_CONNECTIONS // 2),
                num_rounds=num_rounds,
            )
            asked = await interleave_async(
                partial(self._ask, store), num_rounds=num_rounds
            )
        for bare in self._bare:
            bare.close()
        self._pool.shutdown()
        return [
            self._row(f"load {self.name} from a server", loads, 0.6),
            self._row(f"store {self.name} on a server", stores, None),
            Row(name=f"ask a server for {NUM_KEYS} pages", ours=1e6 * asked[0]),
        ]

    def _row(self, name: str, times: Sequence[float], bound: float | None) -> Row:
        ours, baseline = (BATCH_BYTES / MIB / seconds for seconds in times)
        return Row(
            name=name,
            ours=ours,
            unit="MiB/s",
            baseline=baseline,
            against="bare sockets",
            bound=bound,
            at_least=True,
        )

    async def _ask(self, store: RedisStore) -> float:
        keys = self.new_keys(NUM_KEYS)
        with (watch := Stopwatch()):
            await store.contains(keys)
        return watch.seconds

    async def _all(
        self,
        move: Callable[[_Bare, Sequence[bytes], Sequence[PageBuffers]], None],
        names: Sequence[bytes],
        num_threads: int,
    ) -> float:
        if move is _Bare.set:  # new ones, as for the store
            names = [b"bare:" + os.urandom(16).hex().encode() for _ in names]
        loop, share = asyncio.get_running_loop(), -(-len(names) // num_threads)
        with (watch := Stopwatch()):
            parts = [
                loop.run_in_executor(
                    self._pool,
                    move,
                    self._bare[number],
                    names[number * share : (number + 1) * share],
                    self.views[number * share : (number + 1) * share],
                )
                for number in range(num_threads)
            ]
            await asyncio.gather(*parts)
        if move is _Bare.set:
            self._bare[0].remove(names)
        return watch.seconds


class _Bare:
    """A socket, and as little RESP as works."""

    def __init__(self, port: int, head_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = memoryview(bytearray(head_bytes))
        self._small = memoryview(bytearray(64))

    def get(self, names: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        self._socket.sendall(b"".join(map(_get, names)))
        for buffers in pages:
            size = len(self._head) + sum(map(len, buffers))
            self._take(b"$%d\r\n" % size)
            for view in (self._head, *buffers):
                got = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
                assert got == len(view)
            self._take(b"\r\n")

    def set(self, names: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        for name, buffers in zip(names, pages, strict=True):
            size = len(self._head) + sum(map(len, buffers))
            self._socket.sendall(
                b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size)
            )
            for view in (self._head, *buffers, b"\r\n"):
                self._socket.sendall(view)
        for _ in names:
            self._take(b"+OK\r\n")

    def remove(self, names: Sequence[bytes]) -> None:
        self._socket.sendall(
            b"".join(
                b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%s\r\n" % (len(name), name)
                for name in names
            )
        )
        for _ in names:
            self._take(b":1\r\n")

    def close(self) -> None:
        self._socket.close()

    def _take(self, expected: bytes) -> None:
        view = self._small[: len(expected)]
        count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
        assert view[:count] == expected


def _get(name: bytes) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name)
