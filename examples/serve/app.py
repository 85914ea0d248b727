"""The routes. A client that hangs up has its request cancelled, at whatever await.

Servers differ in what they tell of a hang-up, and when. Starlette cancels a streaming
response under some of them, and a handler that computes a plain one never. What all of
them do is to answer ``receive()`` with ``http.disconnect``: so that is what waits here,
beside the answer and in one task group with it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.serve.metrics import CacheCollector
from examples.serve.service import Item, Service
from examples.serve.wire import (
    MAX_BODY_BYTES,
    ApiError,
    Ask,
    Envelope,
    Finish,
    choice,
    event,
    parse,
)

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send


def create_app(service: Service) -> Starlette:
    """Return the application around a service, which runs for its lifespan."""
    registry = CollectorRegistry()
    registry.register(CacheCollector(service.cache))
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    async def models(_: Request) -> Response:
        model = {
            "id": service.served.name,
            "object": "model",
            "created": started,
            "owned_by": "asyncache",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> Response:
        failure = service.failure
        if failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": failure}, 503)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    routes = [
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/models", models),
        Route("/healthz", health),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class HungUpError(Exception):
    """The client is gone: nobody is left to be answered."""


class Completions:
    """``POST /v1/completions``, as an ASGI application.

    ::

        watch    waits until the client hangs up, then cancels the other two
        answer   holds the request's scope, puts pieces into a stream of its own
        send     takes them out, for as long as the client takes to read them
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        config = self._service.served.model.config
        try:
            ask = parse(
                await _body(receive),
                model=self._service.served.name,
                max_tokens=config.max_tokens,
                vocab_tokens=config.vocab_tokens,
            )
        except HungUpError:
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        envelope = Envelope(self._service.served.name)
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, group.cancel_scope)
            sink, source = anyio.create_memory_object_stream[Item](ask.max_tokens + 2)
            group.start_soon(self._service.answer, ask, sink)
            with source:
                first = await source.receive()
                if ask.stream and not isinstance(first, ApiError):
                    await _stream(ask, envelope, first, source, send)
                else:
                    response = await _whole(envelope, first, source)
                    await response(scope, receive, send)
            group.cancel_scope.cancel()


async def _watch(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUpError
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        has_more = message.get("more_body", False)
    return bytes(body)


async def _whole(
    envelope: Envelope, item: Item, source: MemoryObjectReceiveStream[Item]
) -> Response:
    pieces = []
    while isinstance(item, str):
        pieces.append(item)
        item = await source.receive()
    if isinstance(item, ApiError):
        return item.response()
    answer = choice("".join(pieces), item.reason)
    return JSONResponse(envelope.wrap(answer, usage=item.usage()))


async def _stream(
    ask: Ask,
    envelope: Envelope,
    item: Item,
    source: MemoryObjectReceiveStream[Item],
    send: Send,
) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(data: bytes, *, has_more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": has_more})

    while isinstance(item, str):
        await say(event(envelope.wrap(choice(item))))
        item = await source.receive()
    await say(_last_events(ask, envelope, item), has_more=False)


def _last_events(ask: Ask, envelope: Envelope, item: Finish | ApiError) -> bytes:
    if isinstance(item, ApiError):
        return event(item.body())  # too late for a status
    events = [event(envelope.wrap(choice("", item.reason)))]
    if ask.include_usage:
        events.append(event(envelope.wrap(usage=item.usage())))
    return b"".join([*events, event("[DONE]")])
