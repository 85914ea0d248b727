"""What tests of serving set up: a service whose every wait a test can hold.

Store and model stop at gates; clients are sockets. Pools begin as NaN: an answer that
came from a page which nobody filled is not the one that is expected.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import torch

from asyncache import FileStore, Limits
from asyncache.testing import GateStore
from examples.llm.model import Chunk, LlamaConfig, PagedLlama, tiny_llama
from examples.serve.models import ByteText, Served
from examples.serve.service import Service
from examples.serve.wire import Ask

MODEL = tiny_llama(seed=1)
PAGE = 16
NUM_PAGES = 32
PATIENCE_S = 20.0
PROMPT = "A prompt of some pages, whose first ones are in the store by now. " * 2
NUM_STORED = (len(PROMPT) - 1) // PAGE * PAGE
MAX_TOKENS = 12


class HeldModel:
    """The tiny model; a test can hold its thread at a forward."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._hold_at = 0
        self.num_forwards = 0
        self.num_computed = 0
        self.is_broken = False
        self.held = anyio.Event()

    @property
    def config(self) -> LlamaConfig:
        return MODEL.config

    def hold_at(self, nth: int) -> None:
        """Hold the nth forward from now, counted from 1."""
        self._hold_at = self.num_forwards + nth
        self._go.clear()
        self.held = anyio.Event()

    def let_go(self) -> None:
        self._hold_at = 0
        self._go.set()

    def forward(self, chunks: Sequence[Chunk], pool: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.num_forwards == self._hold_at:
            anyio.from_thread.run_sync(self.held.set)
            assert self._go.wait(timeout=PATIENCE_S)
        if self.is_broken:
            raise ArithmeticError("the model is broken")
        self.num_computed += sum(len(chunk.tokens) for chunk in chunks)
        return PagedLlama.forward(MODEL, chunks, pool)


class StubbornStore(GateStore):
    """Reads to the end, whatever becomes of the caller: as a thread does."""

    async def get_into(self, keys, targets, layers=None):
        found = []

        async def read_to_end() -> None:
            with anyio.CancelScope(shield=True):
                found.append(await GateStore.get_into(self, keys, targets, layers))

        async with anyio.create_task_group() as group:
            group.start_soon(read_to_end)
        return found[0]


@functools.cache
def expected(prompt: str, max_tokens: int) -> list[int]:
    """Return the answer that the model gives without a cache."""
    pending, start, answer = ByteText().encode(prompt), 0, []
    config = MODEL.config
    num_pages = -(-(len(pending) + max_tokens) // PAGE)
    shape = (config.num_layers, 2, PAGE, config.num_kv_heads, config.head_dim)
    pool = torch.zeros(num_pages, *shape)
    while len(answer) < max_tokens:
        logits = MODEL.forward([Chunk(pending, start, range(num_pages))], pool)
        start += len(pending)
        pending = [int(logits[0].argmax())]
        answer += pending
    return answer


@dataclass
class Room:
    """A service, and what its requests can be held at."""

    service: Service
    model: HeldModel
    store: GateStore

    @property
    def cache(self):
        return self.service.cache

    @property
    def replica(self):
        return self.cache.statistics().replica

    @property
    def pool(self):
        """Page counts."""
        return self.replica.pools["kv"]

    async def answer(self, prompt: str = PROMPT, max_tokens: int = MAX_TOKENS):
        """Answer a prompt without HTTP."""
        tokens = ByteText().encode(prompt)
        answer = self.service.engine.generate(tokens, max_tokens=max_tokens)
        return [token async for token in answer]

    def check_only_quarantine(self) -> None:
        """Raise unless nobody holds anything, and no page but what is written to."""
        replica, pool = self.replica, self.pool
        assert replica.num_requests == replica.num_waiting == 0, replica
        assert replica.promised_pages == 0, replica
        assert pool.request == pool.transit == 0, pool
        self.cache.check_invariants()

    async def check_clean(self) -> None:
        """Wait until nothing moves; raise unless all pages are free or cached."""
        assert await self.cache.drain(deadline_s=PATIENCE_S) == 0
        await until(lambda: not self.cache.statistics().transfers)
        await until(lambda: not self.pool.quarantine)
        statistics, pool = self.cache.statistics(), self.pool
        assert pool.free + pool.tree == self.service.device.num_pages["kv"], pool
        assert statistics.leaked_pages == 0, statistics
        assert statistics.replica.num_open == 0, statistics
        self.cache.check_invariants()


@asynccontextmanager
async def room(
    directory,
    *,
    gates: type[GateStore] = GateStore,
    num_pages: int = NUM_PAGES,
    limits: Limits | None = None,
    name: str = "tiny",
) -> AsyncIterator[Room]:
    """Make a service, which whatever serves it must run."""
    model = HeldModel()
    store = gates(FileStore(directory), is_open=True)
    service = Service(
        Served(name=name, model=model, text=ByteText(), page_tokens=PAGE),
        num_pages=num_pages,
        store=store,
        limits=limits or Limits(requests=8),
        step_tokens=48,
    )
    service.device.tensor("kv").fill_(torch.nan)
    try:
        yield Room(service, model, store)
    finally:
        model.let_go()
        for gate in (store.contains_gate, store.get_gate, store.put_gate):
            gate.open()


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until something holds."""
    with anyio.fail_after(PATIENCE_S):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def turns(count: int) -> None:
    """Let others run for so many turns of the loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


# Clients.


@dataclass
class Client:
    """A socket with a request under way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def close(self) -> None:
        """Close in good order."""
        self.writer.close()

    def hang_up(self) -> None:
        """Reset the connection, as a process does that is killed with data unread."""
        at_once = struct.pack("ii", 1, 0)
        ours = self.writer.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.writer.transport.abort()

    async def read(self) -> tuple[int, bytes]:
        """Read to the end; return status and body."""
        data = await self.reader.read()
        self.writer.close()
        await self.writer.wait_closed()
        head, _, body = data.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        return int(head.split()[1]), body


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return whole


async def send(port: int, data: bytes, *, receive_bytes: int = 0) -> Client:
    """Connect, and send what may be a part of a request."""
    ours = socket.socket()
    ours.setblocking(False)
    if receive_bytes:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(ours, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=ours, limit=2**12)
    writer.write(data)
    await writer.drain()
    return Client(reader, writer)


async def call(
    port: int, method: str, path: str, body: bytes = b"", *, receive_bytes: int = 0
) -> Client:
    """Send a request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return await send(port, head.encode() + body, receive_bytes=receive_bytes)


async def ask(port: int, *, receive_bytes: int = 0, **fields) -> Client:
    """Send a request for a completion."""
    fields = {"prompt": PROMPT, "max_tokens": MAX_TOKENS} | fields
    body = json.dumps(fields).encode()
    return await call(
        port, "POST", "/v1/completions", body, receive_bytes=receive_bytes
    )


async def completed(port: int, **fields) -> tuple[int, dict]:
    """Ask for a plain completion; return status and answer."""
    status, body = await (await ask(port, **fields)).read()
    return status, json.loads(body)


async def streamed(port: int, **fields) -> tuple[list[dict], bool]:
    """Ask for a stream; return its events, and whether it said that it was done."""
    client = await ask(port, stream=True, **fields)
    status, body = await client.read()
    assert status == 200, body
    events = [event.removeprefix("data: ") for event in body.decode().split("\n\n")]
    assert events.pop() == ""
    is_done = events[-1] == "[DONE]"
    return [json.loads(event) for event in events if event != "[DONE]"], is_done


async def got(port: int, path: str) -> tuple[int, str]:
    """Get a page; return status and text."""
    status, body = await (await call(port, "GET", path)).read()
    return status, body.decode()


def fields_of(body: bytes) -> Ask:
    """Return what a body asks for, for handlers that trust their client."""
    fields = json.loads(body)
    return Ask(
        prompt=ByteText().encode(fields["prompt"]),
        max_tokens=fields["max_tokens"],
        stream=fields["stream"],
        include_usage=False,
        namespace=None,
    )


# What must not be left behind.


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Raise if a task or a socket outlives the block."""
    tasks, sockets = asyncio.all_tasks(), _sockets()
    yield
    # A fixture ends in another task than it began in.
    ours = {*tasks, asyncio.current_task()}
    await until(lambda: asyncio.all_tasks() <= ours)
    await until(lambda: _sockets() <= sockets)


def _sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that listed the others
            found.add(str(entry.readlink()))
    return {path for path in found if path.startswith("socket:")}
