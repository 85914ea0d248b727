"""Connections that wait for their next use, to one server or to those of a cluster.

A connection is used by one job at a time, and kept only if its last job took all that
it had asked for: otherwise the rest would be the next one's answer. So there are never
more than jobs that run at once.
"""

from __future__ import annotations

import threading
from binascii import crc_hqx
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from asyncache.core import StoreError
from asyncache.stores._redis_url import Address, Door
from asyncache.stores._redis_wire import Reply, ReplyError, Wire, WireError, request
from asyncache.threads import Stop

# A server that says so is not, or no longer, the one to ask.
_ELSEWHERE = frozenset(
    {b"ASK", b"CLUSTERDOWN", b"MASTERDOWN", b"MOVED", b"NOAUTH", b"READONLY"}
)
_NUM_SLOTS = 16384
# Not there, in most stores; and never one of ours, which have a space and a hash.
_PROBE = b":probe"


class Node:
    """One server, and the connections to it that nobody uses.

    Args:
        door: How one gets in.
        address: Which server of the cluster; the door's own when None.
        timeout_s: How long to wait for a connection.
    """

    def __init__(self, door: Door, address: Address | None, timeout_s: float) -> None:
        self.address = address or door.address
        self._door = door
        self._address = address
        self._timeout_s = timeout_s
        self._idle: list[Wire] = []
        self._guard = threading.Lock()
        self._is_closed = False
        self.is_doubtful = False
        """Whether another may have taken its place."""
        self.has_moved = False
        """Whether it said that it is one of a cluster, and not the one to ask."""

    @contextmanager
    def wire(self, stop: Stop) -> Iterator[Wire]:
        """Lend a connection to a job, which has all it waits for end with ``stop``.

        Raises:
            OSError: If there is no connection, or it broke.
            StoreError: If the server does not let us in.
        """
        wire = None
        is_good = False
        try:
            wire = self._take() or self._door.connect(
                stop, address=self._address, timeout_s=self._timeout_s
            )
            with stop.interrupting(wire.interrupt):
                yield wire
            if wire.complaints & _ELSEWHERE:
                self.is_doubtful = True
                self.has_moved |= b"MOVED" in wire.complaints
            else:
                is_good = not stop.is_set()
        except OSError:
            self.is_doubtful = True
            if not stop.is_set():
                # What ended this one has ended the others too, perhaps unseen.
                self._drop_idle()
            raise
        finally:
            if wire is not None:
                self._give(wire) if is_good else wire.close()

    def close(self) -> None:
        """Close the connections, also those that are given back later."""
        self._is_closed = True
        self._drop_idle()

    def _take(self) -> Wire | None:
        while True:
            with self._guard:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_idle():
                return wire
            wire.close()

    def _give(self, wire: Wire) -> None:
        with self._guard:
            self._idle.append(wire)
        if self._is_closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        with self._guard:
            dropped, self._idle = self._idle, []
        for wire in dropped:
            wire.close()


class Nodes:
    """The server, or all masters of a cluster that it belongs to.

    Which it is, and who has which keys, is asked of the servers themselves: when the
    store is opened, and again when one of them is gone or says so.
    """

    def __init__(self, door: Door, timeout_s: float) -> None:
        self._door = door
        self._timeout_s = timeout_s
        self._seed = Node(door, None, timeout_s)
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node] = []

    @property
    def is_cluster(self) -> bool:
        """Whether there are several."""
        return bool(self._slots)

    def all(self) -> list[Node]:
        """Return whom to ask for all keys."""
        return list(self._nodes.values()) if self._slots else [self._seed]

    def node_of(self, key: bytes) -> Node:
        """Return who has a key, as far as is known."""
        if not self._slots:
            return self._seed
        return self._slots[crc_hqx(key, 0) % _NUM_SLOTS]

    def take_doubts(self) -> bool:
        """Return whether to look around, once for each reason."""
        known = [self._seed, *self._nodes.values()]
        doubtful = [
            node
            for node in known
            if node.has_moved or (node.is_doubtful and self.is_cluster)
        ]
        for node in doubtful:
            node.is_doubtful = node.has_moved = False
        return bool(doubtful)

    def look_around(self, stop: Stop, prefix: str) -> None:
        """Ask who there is.

        Raises:
            OSError: If nobody answers.
            StoreError: If the server does not let us in, or forbids to ask for keys.
        """
        known = [self._seed, *self._nodes.values()]
        for node in known:
            try:
                self._ask(node, stop, prefix)
            except OSError:
                if node is known[-1]:
                    raise
            else:
                return

    def close(self) -> None:
        """Close all connections."""
        for node in (self._seed, *self._nodes.values()):
            node.close()

    def _ask(self, node: Node, stop: Stop, prefix: str) -> None:
        with node.wire(stop) as wire:
            wire.send(
                request(b"EXISTS", prefix.encode() + _PROBE),
                request(b"CLUSTER", b"SLOTS"),
            )
            refusal = None
            try:
                self._door.check(wire.read_reply)
            except (ConnectionError, StoreError) as error:
                refusal = error
            found: Reply = None
            with suppress(ReplyError):  # not one of a cluster, or it may not be asked
                found = wire.read_reply()
            wire.complaints.clear()
        if isinstance(found, list) and found:
            self._learn(found, node.address[0])
        elif refusal is not None:
            raise refusal

    def _learn(self, ranges: list[Reply], host: str) -> None:
        slots, nodes = [self._seed] * _NUM_SLOTS, dict[Address, Node]()
        for found in ranges:
            match found:
                case [int(first), int(last), [name, int(port), *_], *_]:
                    address = _named(name, host), port
                    node = self._nodes.get(address) or nodes.get(address)
                    if node is None:
                        node = Node(self._door, address, self._timeout_s)
                    nodes[address] = node
                    for slot in range(max(0, first), min(last + 1, _NUM_SLOTS)):
                        slots[slot] = node
                case _:
                    raise WireError(f"not a part of a cluster: {found!r:.80}")
        gone = [node for address, node in self._nodes.items() if address not in nodes]
        self._slots, self._nodes = slots, nodes
        for node in gone:
            node.close()


def _named(name: Reply, host: str) -> str:
    """Return a host's name; that of who was asked where the answer has none."""
    return name.decode(errors="replace") if isinstance(name, bytes) and name else host
