"""Traces as the cache sees them: prompts as runs of pages, each page a number.

A page is known by its parent and its content, so equal numbers mean equal prefixes.
Pages of any size are replayed as pages of one token, whose id is the page's number.

Two formats, told apart by their first request:

* Mooncake: ``hash_ids``, one a block of 512 tokens, and ``input_length``. At 512 tokens
  a page a partial last block is a page too, for it has an id of its own; smaller pages
  split a block, and only whole ones count.
* Text: ``input``, whose UTF-8 bytes are the tokens; only whole pages count.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncache.cli._errors import InputError
from asyncache.cli._records import Record, Records, read_records
from asyncache.core import MAX_TOKEN

BLOCK_TOKENS = 512
TEXT_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Args:
        num_tokens: Tokens of the prompt.
        pages: Numbers of its pages, shape [num_pages], int32, packed.
    """

    num_tokens: int
    pages: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All requests, in order.

    Args:
        name: The file or directory.
        format: "mooncake" or "text".
        digest: Tells the trace, at this page size, from any other.
        page_tokens: Tokens a page.
        prompts: At least one.
        num_distinct: Distinct pages: what a cache that never evicts ends up with.
    """

    name: str
    format: str
    digest: str
    page_tokens: int
    prompts: list[Prompt]
    num_distinct: int


def read_trace(path: Path, *, page_tokens: int | None = None) -> Trace:
    """Read a trace.

    Args:
        path: A JSONL file, or a directory of them.
        page_tokens: Tokens a page; if None, 512 for Mooncake and 16 for text.

    Raises:
        InputError: If a request is malformed, or the page size does not fit the format.
    """
    records = read_records(path)
    is_mooncake = "hash_ids" in records.items[0].fields
    if page_tokens is None:
        page_tokens = BLOCK_TOKENS if is_mooncake else TEXT_PAGE_TOKENS
    read = _read_mooncake if is_mooncake else _read_text
    prompts, num_distinct = read(records, page_tokens)
    return Trace(
        name=str(path),
        format="mooncake" if is_mooncake else "text",
        digest=f"{records.digest}/{page_tokens}",
        page_tokens=page_tokens,
        prompts=prompts,
        num_distinct=num_distinct,
    )


class _Numbers:
    """Numbers the pages, in the order of their first appearance."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def chain(self, contents: Iterable[Hashable]) -> array[int]:
        """Return the number of each page of a prompt."""
        ids, numbers = self._ids, array("i")
        number = -1
        for content in contents:
            number = ids.setdefault((number, content), len(ids))
            numbers.append(number)
        return numbers


def _read_text(records: Records, page_tokens: int) -> tuple[list[Prompt], int]:
    numbers, prompts = _Numbers(), []
    for record in records.items:
        text = _text(record)
        starts = range(0, len(text) - page_tokens + 1, page_tokens)
        pages = numbers.chain(text[start : start + page_tokens] for start in starts)
        prompts.append(Prompt(len(text), pages.tobytes()))
    return prompts, len(numbers)


def _text(record: Record) -> bytes:
    text = record.fields.get("input")
    if not isinstance(text, str):
        raise record.error("neither hash_ids nor an input that is text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise record.error(f"input is not UTF-8: {error.reason}") from error


def _read_mooncake(records: Records, page_tokens: int) -> tuple[list[Prompt], int]:
    if BLOCK_TOKENS % page_tokens:
        raise InputError(
            f"--page-tokens must divide the trace's blocks of {BLOCK_TOKENS} tokens,"
            f" {page_tokens} does not"
        )
    per_block = BLOCK_TOKENS // page_tokens
    numbers, prompts, num_distinct = _Numbers(), [], 0
    for record in records.items:
        block_ids, length = _blocks(record)
        num_known = len(numbers)
        blocks = numbers.chain(block_ids)
        if len(numbers) * per_block > MAX_TOKEN:
            raise record.error(f"more pages so far than the {MAX_TOKEN} there may be")
        pages = _split(blocks, per_block)
        if per_block > 1:
            del pages[length // page_tokens :]
        # What follows a block that is new is new.
        num_old = len(blocks) - (len(numbers) - num_known)
        num_distinct += max(0, len(pages) - num_old * per_block)
        prompts.append(Prompt(length, pages.tobytes()))
    return prompts, num_distinct


def _split(blocks: array[int], per_block: int) -> array[int]:
    """Return the numbers of the pages that blocks consist of."""
    if per_block == 1:
        return blocks
    pages = array("i")
    for block in blocks:
        pages.extend(range(block * per_block, (block + 1) * per_block))
    return pages


def _blocks(record: Record) -> tuple[list[Hashable], int]:
    """Return what each block is, and the tokens of the prompt."""
    ids, length = record.fields.get("hash_ids"), record.fields.get("input_length")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise record.error("hash_ids must be a list of ints")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise record.error(f"input_length must be an int of at least 1, not {length!r}")
    num_blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != num_blocks:
        raise record.error(
            f"{length} tokens are {num_blocks} blocks of {BLOCK_TOKENS}, but hash_ids"
            f" has {len(ids)}"
        )
    blocks: list[Hashable] = list(ids)
    if length % BLOCK_TOKENS:
        blocks[-1] = (ids[-1], length % BLOCK_TOKENS)
    return blocks, length
