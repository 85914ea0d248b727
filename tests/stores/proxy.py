"""A proxy between a store and its server that misbehaves as a test asks it to."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tests.servers import ServerProcess


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
        answer: What is said, instead of the server, to a request that begins in these
            bytes; nothing when None.
    """

    def __init__(
        self, server: ServerProcess, tls: ssl.SSLContext | None = None
    ) -> None:
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
        self.answer: Callable[[bytes], bytes | None] = lambda data: None
        self.is_held = asyncio.Event()
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self._tls
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self.url = self._server.url_at(self.port)
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
                ways = self._up(reader, forth, writer), self._down(back, writer)
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
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
    ) -> None:
        while data := await reader.read(65536):
            if (reply := self.answer(data)) is not None:
                await _take_request(data, reader)
                back.write(reply)
                await self._flush(back)
                return
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


async def _take_request(data: bytes, reader: asyncio.StreamReader) -> None:
    """Read what is left of an HTTP request: its sender would not listen before."""
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    left = int(length[1]) - len(body) if length else 0
    while left > 0 and (more := await reader.read(65536)):
        left -= len(more)
