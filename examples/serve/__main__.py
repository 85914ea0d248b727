"""``python -m examples.serve``: a model and its cache behind HTTP."""

from __future__ import annotations

import argparse
import math
import socket
from contextlib import suppress
from pathlib import Path

import torch
import uvicorn

from asyncache import FileStore
from examples.serve.app import create_app
from examples.serve.models import smollm2, tiny
from examples.serve.service import Service

_MOST_PORT = 65535
_HINTS = """
Ask it, in another terminal:

  curl {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "The capital of France is", "max_tokens": 8}}'
  curl -N {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "Once upon a time", "max_tokens": 200, "stream": true}}'
  curl {url}/metrics
"""


class _Server(uvicorn.Server):
    """A server that says how to use it, once it can be used."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            print(_HINTS.format(url=f"http://{host}:{port}"), flush=True)


def main() -> None:
    """Serve until a signal comes."""
    arguments = _parser().parse_args()
    # One core computes, as an accelerator would; the other is for everything else.
    torch.set_num_threads(1)
    service = Service(
        tiny() if arguments.tiny else smollm2(),
        num_pages=arguments.pages,
        store=None if arguments.store is None else FileStore(arguments.store),
        drain_s=arguments.drain,
    )
    config = uvicorn.Config(
        create_app(service),
        host=arguments.host,
        port=arguments.port,
        lifespan="on",
        # Answers that are under way may end; then they are cancelled.
        timeout_graceful_shutdown=math.ceil(arguments.drain),
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when all is done
        _Server(config).run(sockets=[config.bind_socket()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="examples.serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="0 for any")
    parser.add_argument("--store", type=Path, help="folder where pages are kept")
    parser.add_argument("--pages", type=_pages, default=128, help="pages in memory")
    parser.add_argument(
        "--drain",
        type=_seconds,
        default=10.0,
        help="seconds that answers, and then offloads, may take at the end",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="serve random weights that talk bytes: nothing is installed or converted",
    )
    return parser


def _port(text: str) -> int:
    return _bounded(int(text), least=0, most=_MOST_PORT)


def _pages(text: str) -> int:
    return _bounded(int(text), least=1, most=2**31 - 1)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, not {text}")
    return seconds


def _bounded(value: int, *, least: int, most: int) -> int:
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be in [{least}, {most}], not {value}")
    return value


if __name__ == "__main__":
    main()
