"""Requests as they stand in trace files: JSON lines, in the order of arrival.

The order is by timestamp, and that of the files and lines where timestamps are equal
or some request has none. A bad line is refused with its file and number.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncache.cli._errors import InputError


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a trace file."""

    path: Path
    line: int
    fields: dict[str, object]

    def error(self, message: str) -> InputError:
        """Return an error that names the line."""
        return InputError(f"{self.path}:{self.line}: {message}")

    @property
    def timestamp(self) -> float | None:
        """When the request came, in the file's unit; None if it does not say."""
        value = self.fields.get("timestamp")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"timestamp must be a number, not {value!r}")
        if not math.isfinite(value):
            raise self.error(f"timestamp must be finite, not {value}")
        return value


@dataclass(slots=True)
class Records:
    """All requests of a trace, in order.

    Args:
        items: At least one.
        digest: SHA-256 of the files, which tells this trace from any other.
    """

    items: list[Record] = field(default_factory=list)
    digest: str = ""


def read_records(path: Path) -> Records:
    """Read a file, or all ``*.jsonl`` of a directory.

    Raises:
        InputError: If there is no such file, no request in it, or a line is not a
            JSON object.
    """
    records, sha256 = Records(), hashlib.sha256()
    for file in _files(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
        sha256.update(content)
        records.items.extend(_parse(file, content))
    if not records.items:
        raise InputError(f"{path}: holds no requests")
    records.digest = sha256.hexdigest()
    _sort(records.items)
    return records


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise InputError(f"{path}: holds no *.jsonl")
    return files


def _parse(path: Path, content: bytes) -> Iterator[Record]:
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield Record(path, number, _fields(path, number, line))


def _fields(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(
            f"{path}:{number}: must be an object, not {type(fields).__name__}"
        )
    return fields


def _sort(records: list[Record]) -> None:
    times = [record.timestamp for record in records]
    if None not in times:
        records.sort(key=lambda record: record.timestamp or 0)
