"""Servers of our own to test against, whatever they are: processes on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class ServerProcess(ABC):
    """A server that a test starts, kills, stops and starts again.

    Attributes:
        folder: Its own.
        log: What it wrote.
        port: Where it listens.
    """

    scheme = "http"

    def __init__(self) -> None:
        # A socket's path may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="asyncache-"))
        self.log = self.folder / "log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Return the URL of this server, or of what stands for it at another port."""
        return f"{self.scheme}://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return what starts it; it may end at the end of its standard input."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it is ready."""

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        while not self.answers():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
