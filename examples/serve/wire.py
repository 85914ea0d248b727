"""What comes in and goes out over HTTP, as OpenAI's clients know it."""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from starlette.responses import JSONResponse

MAX_BODY_BYTES = 2**20
_DEFAULT_TOKENS = 16

Json = dict[str, object]


class ApiError(Exception):
    """Something to tell a client in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> Json:
        """Return the error object."""
        is_ours = self.status >= 500  # noqa: PLR2004 - HTTP's
        kind = "server_error" if is_ours else "invalid_request_error"
        error = {
            "message": str(self),
            "type": "rate_limit_error" if self.status == 429 else kind,  # noqa: PLR2004 - HTTP's
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the error as a response; who may come back later is told when."""
        headers = {"Retry-After": "1"} if self.status in {429, 503} else None
        return JSONResponse(self.body(), self.status, headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for a completion, checked as far as its fields go."""

    prompt: str | list[int]
    max_tokens: int
    stream: bool
    include_usage: bool
    namespace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How an answer ended, and what it took."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def usage(self) -> Json:
        """Return the usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the answer, or every chunk of it, begins with."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, *choices: Json, **more: object) -> Json:
        """Return an answer, or a chunk of one."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def choice(text: str, finish_reason: str | None = None) -> Json:
    """Return the only choice of an answer, or a piece of it."""
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def event(data: Json | str) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def parse(body: bytes, *, model: str, max_tokens: int, vocab_tokens: int) -> Ask:
    """Return what a body asks for.

    Fields of OpenAI's that are not named here change nothing: answers are greedy.

    Args:
        body: JSON.
        model: What the served model is called.
        max_tokens: Tokens that the model takes, the answer's included.
        vocab_tokens: Token ids are below this.

    Raises:
        ApiError: If a field is not what it must be.
    """
    fields = _fields(body)
    asked = fields.get("model")
    if asked is not None and asked != model:
        raise ApiError(
            404,
            f"model {reprlib.repr(asked)} is not served here; {model!r} is",
            param="model",
            code="model_not_found",
        )
    num_answers = fields.get("n")
    if num_answers is not None and num_answers != 1:
        _refuse("n", f"must be 1, not {_kind(num_answers)}")
    return Ask(
        prompt=_prompt(fields.get("prompt"), max_tokens, vocab_tokens),
        max_tokens=_count(fields.get("max_tokens"), max_tokens),
        stream=_flag("stream", fields.get("stream")),
        include_usage=_wants_usage(fields.get("stream_options")),
        namespace=_user(fields.get("user")),
    )


def _fields(body: bytes) -> Json:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(fields)}")
    return fields


def _prompt(prompt: object, max_tokens: int, vocab_tokens: int) -> str | list[int]:
    if isinstance(prompt, str):
        _check_text("prompt", prompt)
    elif isinstance(prompt, list):
        _check_tokens(prompt, max_tokens, vocab_tokens)
    else:
        _refuse("prompt", f"must be a string or token ids, not {_kind(prompt)}")
    if not prompt:
        _refuse("prompt", "must have at least 1 token, it is empty")
    return prompt


def _check_tokens(tokens: Sequence[object], max_tokens: int, vocab_tokens: int) -> None:
    if len(tokens) > max_tokens:
        _refuse("prompt", f"has {len(tokens)} tokens, the model takes {max_tokens}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            _refuse("prompt", f"must be token ids, one of them is {_kind(token)}")
        if not 0 <= token < vocab_tokens:
            outside = f"has token id {_kind(token)}, not in [0, {vocab_tokens})"
            _refuse("prompt", outside)


def _count(value: object, most: int) -> int:
    if value is None:
        return _DEFAULT_TOKENS
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse("max_tokens", f"must be an integer, not {_kind(value)}")
    if not 1 <= value <= most:
        _refuse("max_tokens", f"must be in [1, {most}], not {_kind(value)}")
    return value


def _flag(name: str, value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        _refuse(name, f"must be true or false, not {_kind(value)}")
    return value


def _wants_usage(options: object) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        _refuse("stream_options", f"must be an object, not {_kind(options)}")
    return _flag("stream_options.include_usage", options.get("include_usage"))


def _user(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse("user", f"must be a string, not {_kind(value)}")
    _check_text("user", value)
    return value


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _refuse(name, f"is not text: {error}")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), reprlib.repr(value))


def _refuse(param: str, why: str) -> NoReturn:
    raise ApiError(400, f"{param} {why}", param=param)
