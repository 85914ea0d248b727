"""Servers and handlers around a service: each tells of a hang-up in its own way.

==========================  ====================================  ====================
front                       its handler learns                    by
==========================  ====================================  ====================
app, plain and stream       at once                               its own watcher
... behind middleware       at once                               its own watcher
... under a timeout         at once                               its own watcher
StreamingResponse           at once                               Starlette
... behind middleware       at once                               Starlette
aiohttp, asked to cancel    at once                               ``task.cancel()``
Starlette's plain handler   never
aiohttp, plain              never
aiohttp, stream             when it writes                        an error
==========================  ====================================  ====================
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from asyncache import Statistics
from examples.serve.app import create_app
from examples.serve.service import Service
from tests.serve.scene import PATIENCE_S, Room, fields_of, nothing_left, room

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclass
class Front:
    """A server, and what is seen of its only handler."""

    room: Room
    port: int = 0
    patience_s: int = 10
    """Seconds that the server waits for handlers at its end."""
    begun: anyio.Event = field(default_factory=anyio.Event)
    learnt: anyio.Event = field(default_factory=anyio.Event)
    """The handler was told that its client is gone."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    at_end: list[Statistics] = field(default_factory=list)
    """The cache in the moment in which a handler ended."""
    errors: list[BaseException] = field(default_factory=list)
    """What handlers ended with."""
    expire: anyio.Event = field(default_factory=anyio.Event)
    """Set to let the handler's timeout expire."""
    num_connections: Callable[[], int] = int

    def end(self) -> None:
        self.at_end.append(self.room.cache.statistics())
        self.ended.set()


@asynccontextmanager
async def serving(
    open_front, directory, *, patience_s: int = 10, **arguments
) -> AsyncIterator[Front]:
    """Open a front around a new room; raise if it leaves a task or a socket."""
    async with (
        nothing_left(),
        room(directory, **arguments) as here,
        open_front(here, Front(here, patience_s=patience_s)) as front,
    ):
        yield front


# ASGI.


class Probe:
    """Sees what the server tells an application, and when that ends."""

    def __init__(self, app, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def told():
            message = await receive()
            if message["type"] == "http.disconnect":
                self._front.learnt.set()
            return message

        self._front.begun.set()
        try:
            await self._app(scope, told, send)
        except BaseException as error:
            self._front.errors.append(error)
            raise
        finally:
            self._front.end()


class PassOn(BaseHTTPMiddleware):
    """The middleware that everybody has one of."""

    async def dispatch(self, request, call_next):
        return await call_next(request)


@asynccontextmanager
async def uvicorn_with(app, front: Front) -> AsyncIterator[Front]:
    """Serve an ASGI application on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Inherited by connections: a client that does not read is noticed soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    front.port = listener.getsockname()[1]
    config = uvicorn.Config(
        Probe(app, front),
        lifespan="on",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=front.patience_s,
    )
    server = uvicorn.Server(config)
    config.load()
    # What serve() does, without its signals and its clock.
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    assert server.started
    front.num_connections = lambda: len(server.server_state.connections)
    try:
        yield front
    finally:
        await server.shutdown(sockets=[listener])


def _starlette(service: Service, handler) -> Starlette:
    """Return an application of somebody who read half of the manual."""

    @asynccontextmanager
    async def lifespan(_):
        async with service.running():
            yield

    route = Route("/v1/completions", handler, methods=["POST"])
    return Starlette(routes=[route], lifespan=lifespan)


async def _pieces(
    service: Service, body: bytes, *, width: int = 0
) -> AsyncIterator[str]:
    """Yield one token a line, and blanks."""
    asked = fields_of(body)
    tokens = service.engine.generate(asked.prompt, max_tokens=asked.max_tokens)
    async with aclosing(tokens):
        async for token in tokens:
            yield f"{token:<{width}}\n"


def app(here: Room, front: Front):
    return uvicorn_with(create_app(here.service), front)


def app_behind_middleware(here: Room, front: Front):
    application = create_app(here.service)
    application.add_middleware(PassOn)
    return uvicorn_with(application, front)


class _Limited:
    """Puts each HTTP request under a clock."""

    def __init__(self, application, front: Front) -> None:
        self._app = application
        self._front = front

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._run(scope, receive, send)


class UnderTimeout(_Limited):
    async def _run(self, scope, receive, send) -> None:
        async with asyncio.timeout(PATIENCE_S) as limit, asyncio.TaskGroup() as group:

            async def expire() -> None:
                await self._front.expire.wait()
                limit.reschedule(asyncio.get_running_loop().time())

            clock = group.create_task(expire())
            await self._app(scope, receive, send)
            clock.cancel()


class UnderWaitFor(_Limited):
    async def _run(self, scope, receive, send) -> None:
        handler = asyncio.ensure_future(self._app(scope, receive, send))
        expire = asyncio.ensure_future(self._front.expire.wait())
        await asyncio.wait({handler, expire}, return_when=asyncio.FIRST_COMPLETED)
        expire.cancel()
        await asyncio.wait_for(handler, timeout=0.001)


def app_under_timeout(here: Room, front: Front):
    return uvicorn_with(UnderTimeout(create_app(here.service), front), front)


def app_under_wait_for(here: Room, front: Front):
    return uvicorn_with(UnderWaitFor(create_app(here.service), front), front)


def _streaming(here: Room, *, width: int = 0) -> Starlette:
    async def handler(request: Request):
        pieces = _pieces(here.service, await request.body(), width=width)
        return StreamingResponse(pieces)

    return _starlette(here.service, handler)


def streaming_response(here: Room, front: Front):
    return uvicorn_with(_streaming(here), front)


def verbose_streaming_response(here: Room, front: Front):
    """Says more than sockets and their buffers take."""
    return uvicorn_with(_streaming(here, width=2**14), front)


def streaming_response_behind_middleware(here: Room, front: Front):
    application = _streaming(here)
    application.add_middleware(PassOn)
    return uvicorn_with(application, front)


def plain_handler(here: Room, front: Front):
    """Never learns: Starlette tells a handler nothing that does not ask."""

    async def handler(request: Request):
        pieces = [piece async for piece in _pieces(here.service, await request.body())]
        return JSONResponse(pieces)

    return uvicorn_with(_starlette(here.service, handler), front)


# aiohttp.


@asynccontextmanager
async def _aiohttp(here: Room, front: Front, *, cancels: bool) -> AsyncIterator[Front]:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await answer(request, await request.read())
        except BaseException as error:
            front.errors.append(error)
            if isinstance(error, asyncio.CancelledError):
                front.learnt.set()
            raise
        finally:
            front.end()

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        pieces = _pieces(here.service, body)
        if not json.loads(body)["stream"]:
            return web.json_response([piece async for piece in pieces])
        response = web.StreamResponse()
        await response.prepare(request)
        async with aclosing(pieces):
            async for piece in pieces:
                await response.write(piece.encode())
        return response

    application = web.Application()
    application.add_routes([web.post("/v1/completions", handle)])
    runner = web.AppRunner(
        application, access_log=None, handler_cancellation=cancels, handle_signals=False
    )
    async with here.service.running():
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        front.port = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        front.num_connections = lambda: sum(
            connection.connected for connection in runner.server.connections
        )
        try:
            yield front
        finally:
            await runner.cleanup()


def aiohttp_that_cancels(here: Room, front: Front):
    return _aiohttp(here, front, cancels=True)


def aiohttp_as_it_comes(here: Room, front: Front):
    return _aiohttp(here, front, cancels=False)


# Front, and whether its clients stream.
THAT_LEARN = [
    (app, False),
    (app, True),
    (streaming_response, True),
    (aiohttp_that_cancels, False),
    (aiohttp_that_cancels, True),
]
AROUND_THEM = [
    (app_behind_middleware, False),
    (app_behind_middleware, True),
    (app_under_timeout, True),
    (app_under_wait_for, False),
    (streaming_response_behind_middleware, True),
]
THAT_DO_NOT = [
    (plain_handler, False),
    (aiohttp_as_it_comes, False),
]
THAT_EXPIRE = [
    (app_under_timeout, False),
    (app_under_timeout, True),
    (app_under_wait_for, False),
    (app_under_wait_for, True),
]
