"""From a URL to a connection: redis-py reads the one, we make the other.

redis-py's own connections retry and cannot be interrupted. Ours can, at any moment but
one: a resolver that does not answer is waited for.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncache.core import StoreError
from asyncache.stores._redis_wire import ReplyError, Wire, request, shut_down
from asyncache.threads import Stop

Address = tuple[str, int]
_TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)
_OPTIONS = _TLS_OPTIONS | {"db", "username", "password"}
_FORMS = (
    "redis://[[user]:password@]host[:port][/database], the same with rediss://, "
    "or unix://[[user]:password@]/path[?db=database]"
)
# What a server says that may let us in later.
_LATER = ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK")


class Door:
    """Where a server is, and how one gets in.

    Args:
        url: As redis-py takes it; of its options those of TLS and of the database.

    Raises:
        ImportError: If redis-py is not installed.
        StoreError: If the URL is none, or has an option that we do not know.
    """

    def __init__(self, url: str) -> None:
        options = _parse(url)
        kind = options.pop("connection_class", None)
        self._path: str | None = options.pop("path", None)
        self.address: Address = (
            options.pop("host", "localhost"),
            options.pop("port", 6379),
        )
        self._greetings = _greetings(options)
        self._tls: dict[str, Any] | None = None
        tls = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
        if url.startswith("rediss:"):
            self._tls = tls
        elif tls:
            raise StoreError(f"the url has {min(tls)!r}, but only rediss:// is TLS")
        elif url.startswith("unix:") and not self._path:
            raise StoreError(f"the url has no path: write {_FORMS}")
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise StoreError(f"the url has an unknown option, {unknown[0]!r}")
        self._kind = kind
        self._context: ssl.SSLContext | None = None

    def __str__(self) -> str:
        """Where it is, without the password."""
        host, port = self.address
        return f"{host}:{port}" if self._path is None else self._path

    def connect(self, stop: Stop, *, address: Address | None, timeout_s: float) -> Wire:
        """Return a connection that is ready for commands.

        Args:
            stop: Ends the attempt.
            address: Another server of the cluster; the URL's own when None.
            timeout_s: How long to wait for each address that the name has.

        Raises:
            OSError: If there is none to be had now.
            StoreError: If the server does not let us in, and never will.
        """
        if self._tls is not None and self._context is None:
            self._context = self._new_context(self._tls)
        sock = self._reach(stop, address, timeout_s)
        if self._context is not None:
            host, _ = address or self.address
            sock = self._wrapped(self._context, sock, stop, host)
        wire = Wire(sock)
        try:
            with stop.interrupting(wire.interrupt):
                if self._greetings:
                    wire.send(*self._greetings)
                for _ in self._greetings:
                    self.check(wire.read_reply)
        except BaseException:
            wire.close()
            raise
        return wire

    def check(self, read: Callable[[], object]) -> object:
        """Return what is read.

        Raises:
            StoreError: If it is an error that no time will heal.
            OSError: If it is another error, or there is no answer.
        """
        try:
            return read()
        except ReplyError as error:
            if str(error).startswith(_LATER):
                raise ConnectionError(str(error)) from error
            raise StoreError(f"{self} does not let us in: {error}") from error

    def _reach(
        self, stop: Stop, address: Address | None, timeout_s: float
    ) -> socket.socket:
        if address is None:
            if self._path is not None:
                return _connected(stop, socket.AF_UNIX, self._path, timeout_s)
            address = self.address
        failure = OSError(f"{address[0]!r} has no address")
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for family, _, _, _, where in found:
            try:
                return _connected(stop, family, where, timeout_s)
            except OSError as error:
                failure = error
        raise failure

    def _new_context(self, options: dict[str, Any]) -> ssl.SSLContext:
        from redis.exceptions import RedisError  # noqa: PLC0415 - an extra

        try:
            asked = self._kind(**options)
            context = ssl.create_default_context(
                cafile=asked.ca_certs, capath=asked.ca_path
            )
            context.check_hostname = asked.check_hostname
            context.verify_mode = asked.cert_reqs
            if asked.certfile or asked.keyfile:
                context.load_cert_chain(
                    asked.certfile, asked.keyfile, asked.certificate_password
                )
            if asked.ssl_min_version is not None:
                context.minimum_version = asked.ssl_min_version
            if asked.ssl_ciphers:
                context.set_ciphers(asked.ssl_ciphers)
        except (RedisError, OSError, ValueError, TypeError) as error:
            raise StoreError(f"cannot set up TLS to {self}: {error}") from error
        return context

    def _wrapped(
        self, context: ssl.SSLContext, sock: socket.socket, stop: Stop, host: str
    ) -> socket.socket:
        try:
            sock = context.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            with stop.interrupting(partial(shut_down, sock)):
                sock.do_handshake()
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise StoreError(f"{self} is not who it should be: {error}") from error
            raise
        return sock


def _parse(url: str) -> dict[str, Any]:
    try:
        from redis.connection import parse_url  # noqa: PLC0415 - an extra

        parse: Callable[[str], dict[str, Any]] = parse_url  # it has no types
    except ImportError as error:
        raise ImportError(
            "RedisStore needs redis-py: pip install 'asyncache[redis]'"
        ) from error
    try:
        options = parse(url)
    except ValueError:
        # Its own words may have the password in them.
        raise StoreError(f"cannot read the url: write {_FORMS}") from None
    database = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if database and not {"path", "db"} & set(options):
        raise StoreError(f"the url's database is no number: write {_FORMS}")
    return options


def _greetings(options: dict[str, Any]) -> list[bytes]:
    found = []
    if options.get("password") is not None:
        names = [options["username"]] if options.get("username") else []
        words = [word.encode() for word in (*names, options["password"])]
        found.append(request(b"AUTH", *words))
    if options.get("db"):
        found.append(request(b"SELECT", b"%d" % options["db"]))
    return found


def _connected(stop: Stop, family: int, where: Any, timeout_s: float) -> socket.socket:  # noqa: ANN401 - an address of any family
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        code = sock.connect_ex(where)
        if code == errno.EINPROGRESS:
            # Not before it has begun: a socket that is nothing yet cannot be shut down.
            with stop.interrupting(partial(shut_down, sock)):
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                is_over = poll.poll(1000 * timeout_s)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            code = code if is_over else errno.ETIMEDOUT
        _raise_for(code)
        sock.settimeout(None)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _raise_for(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
