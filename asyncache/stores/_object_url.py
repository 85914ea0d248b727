"""From a URL to a bucket: obstore reads the one and makes the other.

What it is told here, credentials among it, must show up nowhere: not in a repr, and
not in an error, into which obstore copies URLs and options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from asyncache.core import StoreError

_FORMS = "s3://bucket[/path], gs://bucket[/path], az://container[/path] or file:///path"
# Not of the bucket's own configuration.
_ASIDE = ("client_options", "credential_provider", "retry_config")
_REMOTE = frozenset({"azure", "gcs", "http", "s3"})
_MAX_CONNECT_S = 5.0


def load_client() -> Any:  # noqa: ANN401 - an extra, whose types may not be there
    """Return obstore.

    Raises:
        ImportError: If it is not installed; names the extra.
    """
    try:
        client = import_module("obstore")
        import_module("obstore.exceptions")
        import_module("obstore.store")
    except ImportError as error:
        raise ImportError(
            "ObjectStore needs obstore: pip install 'asyncache[object]'"
        ) from error
    return client


def name_of(target: object) -> str:
    """Return where a target is, without anything that may be secret."""
    if not isinstance(target, str):
        return type(target).__name__
    try:
        parts = urlsplit(target)
    except ValueError:
        return "a url that is none"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connect(
    client: Any,  # noqa: ANN401 - as above
    target: object,
    options: Mapping[str, Any] | None,
    timeout_s: float,
) -> object:
    """Return obstore's store for a target, without any I/O but on this host's disk.

    Raises:
        StoreError: If the URL cannot be read, or has an option that obstore refuses.
        ValueError: If there are options for a store that is made already.
        TypeError: If the target is neither a URL nor a store of obstore's.
    """
    if not isinstance(target, str):
        if not type(target).__module__.startswith("obstore"):
            kind = type(target).__name__
            raise TypeError(f"target must be a url or a store of obstore's, not {kind}")
        if options:
            raise ValueError("options are for a url: give them to the store itself")
        return target
    given = options or {}
    try:
        kind = client.parse_scheme(target)
        arguments = _arguments(kind, dict(given), timeout_s)
        store: object = client.store.from_url(target, **arguments)
    except (client.exceptions.BaseError, OSError, TypeError, ValueError) as error:
        told = _first_line(error, [*_secrets(given), *_secrets_of_url(target)])
        raise StoreError(f"cannot open {name_of(target)}: {told}") from None
    return store


def _arguments(kind: str, given: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    if kind not in _REMOTE:
        return given
    aside = {name: given.pop(name) for name in _ASIDE if name in given}
    if kind == "s3":
        # We have digests of our own; theirs took more than half of a put's time.
        given.setdefault("unsigned_payload", True)
    defaults = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(timeout_s, _MAX_CONNECT_S)),
    }
    aside["client_options"] = defaults | aside.get("client_options", {})
    # The engine decides what is tried again.
    aside["retry_config"] = {"max_retries": 0} | aside.get("retry_config", {})
    return aside | ({"config": given} if given else {})


def _first_line(error: Exception, secrets: list[str]) -> str:
    line = str(error).partition("\n")[0]
    if not line or any(secret in line for secret in secrets):
        return f"write {_FORMS}, with options that obstore knows"
    return line


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value:
            yield value


def _secrets_of_url(url: str) -> Iterator[str]:
    head, _, query = url.partition("?")
    if query:
        yield query
    if "@" in head:
        yield head.partition("://")[2].rpartition("@")[0]
