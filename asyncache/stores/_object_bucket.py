"""What is asked of a bucket, object by object, with an answer for every error.

obstore moves bytes on threads of its own, into and out of memory that it owns: whoever
is cancelled here leaves nothing behind that touches anybody's pages.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from asyncache.core import StoreError
from asyncache.stores._abc import Status

_PROBE = "asyncache"
_CHUNK = 500
_NO_ROOM = re.compile(
    "status code: (?:413|507)|<Code>(?:EntityTooLarge|[A-Za-z]*Quota[A-Za-z]*)</Code>"
    "|No space left on device|Disk quota exceeded|File too large"
)
_TOO_SHORT = re.compile("status code: 416|StartTooLarge|OutOfRange|UnexpectedEof")
_NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_CODE = re.compile("<Code>([A-Za-z]{1,64})</Code>")


class Made(Enum):
    """What became of an object that should be made."""

    NOW = auto()
    BEFORE = auto()
    """It was there, and is as it was."""
    NO_ROOM = auto()
    UNKNOWN = auto()
    """There was no answer: it may be there or not."""

    @property
    def status(self) -> Status:
        """What that means for a page that is put."""
        if self is Made.NO_ROOM:
            return Status.REJECTED
        return Status.UNAVAILABLE if self is Made.UNKNOWN else Status.HIT


class Reply(NamedTuple):
    """What was read.

    Args:
        status: HIT, MISS, CORRUPT where the object has not the bytes that were asked
            for, or UNAVAILABLE.
        parts: The bytes, in obstore's memory.
    """

    status: Status
    parts: Sequence[memoryview] = ()


class Entry(NamedTuple):
    """An object in a listing: its name, its length, and when it was made."""

    path: str
    num_bytes: int
    made: datetime


class Bucket:
    """A bucket, or what obstore takes for one.

    Args:
        client: obstore.
        store: Its store.
    """

    def __init__(self, client: Any, store: object) -> None:  # noqa: ANN401 - an extra
        self._client = client
        self._store = store
        errors = client.exceptions
        self._errors = (errors.BaseError, OSError)
        self._already = errors.AlreadyExistsError
        self._refusals = (errors.PermissionDeniedError, errors.UnauthenticatedError)

    async def probe(self, prefix: str, where: str) -> None:
        """Ask for an object that is not there.

        Raises:
            StoreError: If the bucket is not there either, or does not let us in.
        """
        refusal = None
        try:
            await self._client.get_async(self._store, f"{prefix}{_PROBE}")
        except self._refusals as error:
            code = _CODE.search(str(error))
            told = "" if code is None else f": {code[1]}"
            refusal = f"{where} does not let us in{told}"
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                refusal = f"{where} is no bucket: make it first"
        except self._errors:
            return  # it may come up later
        if refusal is not None:
            raise StoreError(refusal)

    async def has(self, path: str, num_bytes: int | None = None) -> Status:
        """Return whether there is an object: HIT, MISS, or CORRUPT if not so long.

        Args:
            path: Its name.
            num_bytes: Its length; any when None.
        """
        try:
            found = await self._client.head_async(self._store, path)
        except FileNotFoundError:
            return Status.MISS
        except self._errors:
            return Status.UNAVAILABLE
        is_good = num_bytes in {None, found["size"]}
        return Status.HIT if is_good else Status.CORRUPT

    async def read(self, path: str, num_bytes: int) -> Reply:
        """Read all of an object of this length; nothing of one of another."""
        try:
            found = await self._client.get_async(self._store, path)
            if found.meta["size"] != num_bytes:
                return Reply(Status.CORRUPT)
            return _reply([await found.bytes_async()], [range(num_bytes)])
        except self._errors as error:
            return self._failure(error)

    async def read_small(self, path: str, num_bytes: int) -> Reply:
        """Do as :meth:`read`; one wait, and not one for the bytes, which are few."""
        try:
            # A byte more than there should be, to know that there is none.
            data = await self._client.get_range_async(
                self._store, path, start=0, end=num_bytes + 1
            )
        except self._errors as error:
            return self._failure(error)
        return _reply([data], [range(num_bytes)])

    async def read_spans(self, path: str, spans: Sequence[range]) -> Reply:
        """Read parts of an object, each by a request, at the same time."""
        starts, ends = zip(*((span.start, span.stop) for span in spans), strict=True)
        try:
            parts = await self._client.get_ranges_async(
                self._store, path, starts=starts, ends=ends, coalesce=0
            )
        except self._errors as error:
            return self._failure(error)
        return _reply(parts, spans)

    async def make(self, path: str, data: bytes | memoryview) -> Made:
        """Make an object, unless there is one. ``data`` must be nobody else's."""
        return await self._put(path, data, "create")

    async def write(self, path: str, data: bytes | memoryview) -> Made:
        """Make an object under a name that is new. ``data`` must be nobody else's."""
        return await self._put(path, data, "overwrite")

    async def delete(self, path: str) -> bool:
        """Delete an object, if it is there; return whether there is none now."""
        try:
            await self._client.delete_async(self._store, path)
        except FileNotFoundError:
            return True
        except self._errors:
            return False
        return True

    def walk(self, folder: str) -> Callable[[], Awaitable[list[Entry] | None]]:
        """Return what to await for the objects under a folder, some at a time.

        It answers with none at the end, and with None where there is no answer.
        """
        chunks = self._client.list(self._store, folder, chunk_size=_CHUNK)

        async def advance() -> list[Entry] | None:
            try:
                # anext() with a default does not bear how obstore ends.
                chunk = await chunks.__anext__()
            except StopAsyncIteration:
                return []
            except self._errors:
                return None
            return [
                Entry(found["path"], found["size"], found["last_modified"])
                for found in chunk
            ]

        return advance

    async def _put(self, path: str, data: bytes | memoryview, mode: str) -> Made:
        try:
            await self._client.put_async(
                self._store, path, data, mode=mode, use_multipart=False
            )
        except self._already:
            return Made.BEFORE
        except self._errors as error:
            return Made.NO_ROOM if _NO_ROOM.search(str(error)) else Made.UNKNOWN
        return Made.NOW

    def _failure(self, error: BaseException) -> Reply:
        if isinstance(error, FileNotFoundError):
            return Reply(Status.MISS)
        is_short = _TOO_SHORT.search(str(error))
        return Reply(Status.CORRUPT if is_short else Status.UNAVAILABLE)


def _reply(parts: Sequence[Any], spans: Sequence[range]) -> Reply:
    views = [memoryview(part) for part in parts]
    is_whole = list(map(len, views)) == list(map(len, spans))
    return Reply(Status.HIT, views) if is_whole else Reply(Status.CORRUPT)
