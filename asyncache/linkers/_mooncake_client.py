"""A client of Mooncake: how one is made, what we call of it, what its codes mean."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from asyncache.core import StoreError

MISSING = -704
FAILED_TRANSFER = -800
"""Of a put: the master gives room on a node that is gone, until it takes note of it."""
INVALID = -600
NO_ROOM = -200

# Nonsense, which whoever serves answers at once, if only by hanging up: the kernel
# accepts connections for a process that is stopped, too.
_KNOCK = bytes(64)
_KNOCK_S = 0.5


class Client(Protocol):
    """What we use of a ``MooncakeDistributedStore``.

    All of it blocks without the GIL, 30 s at most where the master does not answer.
    """

    def register_buffer(self, buffer_ptr: int, size: int, /) -> int:
        """Let memory be read and written directly; 0 if so."""

    def unregister_buffer(self, buffer_ptr: int, /) -> int:
        """Forget memory; 0 if it was known."""

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """Return 1 for each object that is there, 0 if it is not; else a code."""

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]:
        """Return 0 for each object that is there now; what was there stays as it is."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]:
        """Return the size of each object that was read; else a code."""

    def get_size(self, key: str, /) -> int:
        """Return the size of an object; else a code."""

    def remove(self, key: str, force: bool, /) -> int:  # noqa: FBT001 - as it is there
        """Remove an object, read by others or not where ``force``."""

    def close(self) -> int:
        """Let go of everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSetup:
    """What a client of Mooncake is set up with, by Mooncake's own names.

    Args:
        master_server_addr: Where ``mooncake_master`` is, ``host:port``.
        local_hostname: By what others reach this host, with a port or without; of IPv6
            in brackets.
        protocol: "tcp" or "rdma".
        rdma_devices: Names of devices, with commas between them.
        metadata_server: Where endpoints are found; with "P2PHANDSHAKE" there is no such
            server.
        global_segment_size: Bytes of memory that this process contributes to the store
            for as long as the linker is open; 0 for none.
    """

    master_server_addr: str
    local_hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    rdma_devices: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int = 0

    def __post_init__(self) -> None:
        if not self.master_server_addr:
            raise ValueError("master_server_addr must be host:port, not ''")
        if self.global_segment_size < 0:
            raise ValueError(
                f"global_segment_size must be at least 0: {self.global_segment_size}"
            )


def check_installed() -> None:
    """Raise ImportError, which says what to install, where there is no Mooncake."""
    try:
        import_module("mooncake.store")
    except ImportError as error:
        raise ImportError(
            "MooncakeLinker needs Mooncake: pip install 'asyncache[mooncake]', and the "
            f"system's libibverbs, as by apt-get install libibverbs1 ({error})"
        ) from error


def is_there(setup: MooncakeSetup) -> bool:
    """Return whether something serves where the master should be.

    To be asked before :func:`connect`, which would block for long. Whoever is not found
    by a host and a port is taken to be there.
    """
    host, colon, port = setup.master_server_addr.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=_KNOCK_S) as door:
            door.sendall(_KNOCK)
            with suppress(ConnectionResetError):
                door.recv(1)
    except OSError:
        return False
    return True


def connect(setup: MooncakeSetup) -> Client:
    """Return a client that is set up.

    Raises:
        StoreError: If it cannot be set up.
    """
    client = import_module("mooncake.store").MooncakeDistributedStore()
    code = client.setup(
        local_hostname=_with_port(setup.local_hostname),
        metadata_server=setup.metadata_server,
        global_segment_size=setup.global_segment_size,
        # Memory of its own, for calls that copy: we make none.
        local_buffer_size=0,
        protocol=setup.protocol,
        rdma_devices=setup.rdma_devices,
        master_server_addr=setup.master_server_addr,
    )
    if code != 0:
        raise StoreError(f"Mooncake cannot be set up as {setup}: code {code}")
    return cast("Client", client)


def _with_port(hostname: str) -> str:
    """Return a host with a port that is free: left to itself, Mooncake tries 20.

    Each of them until the master answers, or for half a minute.
    """
    if ":" in hostname.rpartition("]")[2]:
        return hostname
    with socket.socket() as found:
        found.bind(("", 0))
        return f"{hostname}:{found.getsockname()[1]}"
