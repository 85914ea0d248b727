"""An archive of pages: a plain tar file, whose members are a FileStore's page files.

So ``tar xf`` into a directory feeds a FileStore, and ``tar cf`` of one can be imported.
Read here with nothing but bounded memory: an archive may come from anywhere, and what
it says is a claim. Nothing is ever written where its names lead.
"""

from __future__ import annotations

import re
import tarfile
from typing import NamedTuple

from asyncache.cli._errors import InputError
from asyncache.cli._store_stream import Stream
from asyncache.core import PageHash, PageKey, PageSpace

_BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * _BLOCK)
"""What an archive ends with."""
_MOST_HEADER_BYTES = 2**20
_SCRATCH_BYTES = 2**18
_NAME = re.compile(
    r"(?:\./)*(?P<space>[^/]+)/(?:[0-9a-f]{2}/)?(?P<hash>[0-9a-f]{64})\.kv"
)
_RECORD = re.compile(rb"([0-9]{1,18}) ([^=\n]{1,1000})=")
_NUMBER = re.compile(r"[0-9]{1,18}")
_FILE_TYPES = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
# Links, devices, directories and FIFOs have no bytes, whatever their size says.
_EMPTY_TYPES = frozenset(
    {
        tarfile.LNKTYPE,
        tarfile.SYMTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.DIRTYPE,
        tarfile.FIFOTYPE,
    }
)


class Member(NamedTuple):
    """What an archive has next."""

    key: PageKey | None
    """The page that it says it is; None if it is none of ours."""
    num_bytes: int


def member_head(key: PageKey, num_bytes: int) -> bytes:
    """Return what goes before the bytes of a page's file."""
    name = key.hash.hex()
    member = tarfile.TarInfo(f"{key.space.name}/{name[-2:]}/{name}.kv")
    member.size = num_bytes
    return member.tobuf(tarfile.PAX_FORMAT)


def padding(num_bytes: int) -> bytes:
    """Return what goes after so many bytes of a member."""
    return bytes(-num_bytes % _BLOCK)


class TarReader:
    """Reads an archive from its beginning to its end. Blocking, for one thread.

    Args:
        stream: The archive.
        name: What it is called, for errors.
    """

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._num_left = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def next(self) -> Member | None:
        """Skip what is left of the last member; return the next, or None at the end.

        Raises:
            InputError: If it is no archive, or only the beginning of one.
        """
        extras: dict[str, str] = {}
        while True:
            self._skip()
            found = self._read_header()
            if found is None:
                return None
            self._num_left = 0 if found.type in _EMPTY_TYPES else found.size
            self._num_left += -self._num_left % _BLOCK
            match found.type:
                case tarfile.XHDTYPE | tarfile.SOLARIS_XHDTYPE:
                    extras |= self._read_records(found.size)
                case tarfile.GNUTYPE_LONGNAME:
                    text = self._read_text(found.size)
                    extras["path"] = text.partition(b"\0")[0].decode(errors="replace")
                case tarfile.GNUTYPE_LONGLINK | tarfile.XGLTYPE:
                    pass
                case _:
                    return self._member(found, extras)

    def read_into(self, view: memoryview) -> None:
        """Read the bytes of a member, which is as long as the view.

        Raises:
            InputError: If they end before.
        """
        self._fill(view)
        self._num_left -= len(view)

    def _member(self, found: tarfile.TarInfo, extras: dict[str, str]) -> Member:
        size = found.size
        if "size" in extras:
            if not _NUMBER.fullmatch(extras["size"]):
                raise self._error(f"a member has the size {extras['size']!r:.40}")
            size = int(extras["size"])
        if found.type in _EMPTY_TYPES:
            return Member(None, 0)
        self._num_left = size + -size % _BLOCK
        is_file = found.type in _FILE_TYPES
        key = _key_of(extras.get("path", found.name)) if is_file else None
        return Member(key, size)

    def _read_header(self) -> tarfile.TarInfo | None:
        block = self._read(_BLOCK)
        if not any(block):
            self._stream.read_into(self._scratch[:_BLOCK])  # the other half of the end
            return None
        try:
            found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._error(str(error)) from error
        if found.size < 0:
            raise self._error(f"a member has the size {found.size}")
        return found

    def _read_records(self, size: int) -> dict[str, str]:
        """Return what a header of pax says of the member after it."""
        text, at = self._read_text(size), 0
        found: dict[str, str] = {}
        while at < len(text):
            match = _RECORD.match(text, at)
            end = at + int(match[1]) if match else 0
            if match is None or not match.end() < end <= len(text):
                raise self._error(f"a record is {text[at : at + 40]!r}")
            # Nothing else of it, or there might be any number.
            if match[2] in {b"path", b"size"}:
                value = text[match.end() : end - 1]
                found[match[2].decode()] = value.decode(errors="replace")
            at = end
        return found

    def _read_text(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise self._error(f"a header has {size} bytes, of {_MOST_HEADER_BYTES}")
        text = self._read(size)
        self._num_left -= size
        return text

    def _read(self, size: int) -> bytes:
        memory = bytearray(size)
        self._fill(memoryview(memory))
        return bytes(memory)

    def _fill(self, view: memoryview) -> None:
        if self._stream.read_into(view) < len(view):
            raise self._error("it ends before its end")

    def _skip(self) -> None:
        while self._num_left:
            part = self._scratch[: self._num_left]
            self._fill(part)
            self._num_left -= len(part)

    def _error(self, what: str) -> InputError:
        return InputError(
            f"{self._name}: no archive of pages: byte {self._stream.num_bytes}: {what}"
        )


def _key_of(name: str) -> PageKey | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        space = PageSpace.from_name(match["space"])
    except ValueError:
        return None
    return PageKey(PageHash(bytes.fromhex(match["hash"])), space)
