"""Servers of our own to test against: processes on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class ServerProcess:
    """A server that is started, hurt and started again; its output is in a file."""

    def __init__(self) -> None:
        # A socket's path may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="asyncache-"))
        self.log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self, command: list[str], is_ready: Callable[[], bool]) -> None:
        """Start a process, and wait until it is ready.

        It ends by itself at the end of its standard input, if it reads that.
        """
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        while not is_ready():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
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
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)
