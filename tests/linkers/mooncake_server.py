"""A Mooncake Store of our own to test against: a master, and nodes that keep bytes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from asyncache import MooncakeSetup
from asyncache.linkers._mooncake_client import check_installed
from tests.servers import ServerProcess, free_port

SEGMENT_BYTES = 64 * 2**20
_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
master, hostname, num_bytes = sys.argv[1:]
node = MooncakeDistributedStore()
code = node.setup(hostname, "P2PHANDSHAKE", int(num_bytes), 0, "tcp", "", master)
print("set up:", code, flush=True)
sys.stdin.read()
"""


@cache
def why_not() -> str | None:
    """Return why there is no Mooncake here; None if there is."""
    try:
        check_installed()
    except ImportError as error:
        return str(error)
    return None


def need_mooncake() -> None:
    """Skip the test, saying why, where there is none."""
    import pytest

    if (reason := why_not()) is not None:
        pytest.skip(reason)


class Master(ServerProcess):
    """Knows where objects are, and keeps none.

    Args:
        options: Such as ``"--client_ttl=1"``.
    """

    def __init__(self, *options: str) -> None:
        need_mooncake()
        super().__init__()
        self._options = options

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def setup(self) -> MooncakeSetup:
        return MooncakeSetup(master_server_addr=self.address)

    def command(self) -> list[str]:
        import mooncake

        return [
            str(Path(mooncake.__file__).with_name("mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            *self._options,
        ]

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True


class Node(ServerProcess):
    """Keeps bytes, in a process of its own."""

    def __init__(self, master: Master, num_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__()
        self._master, self._num_bytes = master, num_bytes

    def command(self) -> list[str]:
        # A new one each time: the master remembers the last.
        hostname = f"127.0.0.1:{free_port()}"
        arguments = [self._master.address, hostname, str(self._num_bytes)]
        return [sys.executable, "-c", _NODE, *arguments]

    def answers(self) -> bool:
        return b"set up: 0\n" in self.log.read_bytes()


@contextmanager
def running_master(*options: str) -> Iterator[Master]:
    master = Master(*options)
    try:
        master.start()
        yield master
    finally:
        master.close()


@contextmanager
def running_node(master: Master, num_bytes: int = SEGMENT_BYTES) -> Iterator[Node]:
    node = Node(master, num_bytes)
    try:
        node.start()
        yield node
    finally:
        node.close()


@contextmanager
def bare_client(master: Master) -> Iterator[Any]:
    """Lend a client that knows nothing of us, and has memory to copy through."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(
        f"127.0.0.1:{free_port()}",
        "P2PHANDSHAKE",
        0,
        16 * 2**20,
        "tcp",
        "",
        master.address,
    )
    assert code == 0
    try:
        yield client
    finally:
        client.close()
