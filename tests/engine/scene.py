"""What tests of the engine set up: a small model whose pages tell what they mean.

A page's bytes are a function of its layer, of all tokens up to its end, of the weights
and of the namespace, so a page that was given to two, read before it landed or loaded
into the wrong place shows. Pools begin poisoned: nothing but a copy of the right page
makes a page right.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import anyio
import anyio.lowlevel
import torch

from asyncache.core import (
    AttentionPool,
    KVLayout,
    Namespace,
    PageKey,
    PageState,
    hash_pages,
    root_hash,
)
from asyncache.devices import CpuDevice, Device
from asyncache.engine import Event, KVCache, Limits, Request
from asyncache.linkers import Linker, StoreLinker
from asyncache.stores import MemoryStore, Store
from asyncache.testing import GateDevice, GateStore, leftovers

PAGE = 4
"""Tokens a page."""
KV = AttentionPool(num_layers=2, num_kv_heads=1, head_dim=4, dtype="uint8")
LAYOUT = KVLayout(model="scene", page_tokens=PAGE, pools=(KV,))
POISON = 0xFF
LIMITS = Limits(close_s=5.0, retry_s=0.001, breaker_s=0.001)
REVISIONS = (LAYOUT, replace(LAYOUT, revision="v2"), replace(LAYOUT, revision="v3"))
NAMESPACES = (None, "tenant-1", "tenant-2")
MEANINGS = {
    root_hash(layout, namespace): (layout, namespace)
    for layout, namespace in itertools.product(REVISIONS, NAMESPACES)
}
"""Weights and namespace of the prefixes whose pages are checked, by their root."""


def prompt(num_pages: int, *, seed: int = 0) -> list[int]:
    """Return a prompt of so many whole pages and one token, which is never a hit."""
    return [1000 * seed + place for place in range(num_pages * PAGE + 1)]


# What a page means.


def content(
    tokens: Sequence[int],
    position: int,
    pool=KV,
    layout=LAYOUT,
    namespace: Namespace = None,
) -> bytes:
    """Return the bytes of the page at a position of a prompt, all layers."""
    prefix = array("i", tokens[: (position + 1) * layout.page_tokens]).tobytes()
    space = layout.space(pool)
    whose = f"{pool.name} {layout.revision} {namespace!r}"
    return b"".join(
        hashlib.shake_128(f"{whose} {layer}".encode() + prefix).digest(
            space.layer_bytes
        )
        for layer in range(space.num_layers)
    )


def read(device: Device, page: int, pool: str = "kv") -> bytes:
    """Return the bytes of a page."""
    return device.tensor(pool)[page].contiguous().numpy().tobytes()


def write(device: Device, page: int, data: bytes, pool: str = "kv") -> None:
    """Overwrite a page, as a model does."""
    target = device.tensor(pool)[page]
    target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view_as(target))


def snapshot(device: Device, pool: str = "kv") -> list[bytes]:
    """Return the bytes of all pages."""
    return [read(device, page, pool) for page in range(device.num_pages[pool])]


def compute(device: Device, request: Request, tokens: Sequence[int], start=0) -> None:
    """Fill a request's whole pages from a position on, as a forward would.

    With the weights of now, whatever those below were computed with.
    """
    layout = request._runtime.replica._state.layout
    namespace = request._prompt.namespace
    table = request.page_table["kv"]
    for position in range(start, min(len(table), len(tokens) // PAGE)):
        data = content(tokens, position, layout=layout, namespace=namespace)
        write(device, table[position], data)


def check_pages(
    device: Device, request: Request, tokens: Sequence[int], num_tokens: int
) -> None:
    """Raise unless the leading pages of a request hold what they mean."""
    layout, namespace = meaning(request)
    table = request.page_table["kv"]
    for position in range(num_tokens // PAGE):
        wanted = content(tokens, position, layout=layout, namespace=namespace)
        assert read(device, table[position]) == wanted, position


def meaning(request: Request) -> tuple[KVLayout, Namespace]:
    """Return the weights and the namespace that a request's hit is of."""
    return MEANINGS.get(request._state.root_hash, (LAYOUT, request._prompt.namespace))


# Stores.


def keys(tokens: Sequence[int], namespace: Namespace = None, pool=KV, layout=LAYOUT):
    """Return the store keys of a prompt's whole pages."""
    packed = array("i", tokens).tobytes()
    root = root_hash(layout, namespace)
    hashes = hash_pages(packed, page_tokens=layout.page_tokens, parent=root)
    space = layout.space(pool)
    return [PageKey(page_hash, space) for page_hash in hashes]


async def store_pages(
    store: Store,
    tokens: Sequence[int],
    namespace: Namespace = None,
    pool=KV,
    layout=LAYOUT,
) -> list[PageKey]:
    """Put a prompt's whole pages into a store, as another process did before."""
    names = keys(tokens, namespace, pool, layout)
    pages = [
        [memoryview(content(tokens, position, pool, layout, namespace))]
        for position in range(len(names))
    ]
    await store.put(names, pages)
    return names


async def memory_store(*prompts: Sequence[int]) -> MemoryStore:
    """Return a store that holds these prompts."""
    store = MemoryStore(2**24)
    for tokens in prompts:
        await store_pages(store, tokens)
    return store


async def gate_store(*prompts: Sequence[int], is_open: bool = False) -> GateStore:
    """Return a store that holds these prompts, and its callers."""
    return GateStore(await memory_store(*prompts), is_open=is_open)


# Caches.


@dataclass
class Log:
    """Keeps all events."""

    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Scene:
    """A cache, where its pages are, and what it told."""

    cache: KVCache
    device: Device
    log: Log
    loop_errors: list[dict[str, object]] = field(default_factory=list)
    """What reached the event loop's exception handler."""

    @property
    def replica(self):
        return self.cache._runtime.replica

    def dump(self):
        """Return the whole state, for comparing."""
        return self.replica.look.dump()

    def pages(self, state: PageState, pool: int = 0) -> set[int]:
        """Return which pages are in a state."""
        ledger = self.replica._state.ledgers[pool]
        return {p for p in range(ledger.num_pages) if ledger.state(p) is state}

    @property
    def pool(self):
        """Page counts of the attention pool."""
        return self.cache.statistics().replica.pools["kv"]

    async def serve(
        self, tokens: Sequence[int], *, namespace: Namespace = None, **restore: float
    ) -> int:
        """Serve a prompt from its restore to its commit; return the hit's length."""
        with self.cache.request(tokens, namespace=namespace) as request:
            hit = await (await request.restore(**restore)).wait()
            self.finish(request, tokens, hit.num_tokens)
            return hit.num_tokens

    def finish(self, request: Request, tokens: Sequence[int], num_hit: int) -> None:
        """Compute what a hit does not cover, and share it."""
        check_pages(self.device, request, tokens, num_hit)
        request.extend(len(tokens))
        with self.cache.forward([request]):
            compute(self.device, request, tokens, num_hit // PAGE)
        request.commit(len(tokens))

    def expire(self, state) -> None:
        """Let the deadline of a request's restore come now."""
        runtime = self.cache._runtime
        runtime._deadlines[state.seq].cancel()
        runtime._deadline(state)

    async def rest(self) -> None:
        """Wait until nothing moves, and check that nothing was left behind."""
        await self.forwards_end()  # their pages may be offloaded then
        assert await self.cache.drain(deadline_s=20) == 0
        with anyio.fail_after(20):
            # A lookup that was stopped moves no pages, but may still end a thread.
            while self.cache.statistics().transfers:
                await turns(1)
        await turns(3)
        self.check_clean()

    async def forwards_end(self) -> None:
        """Wait until no stream runs a forward any more; on a CPU none does."""
        with anyio.fail_after(20):
            while self.cache._runtime.driver._open_brackets:
                await turns(1)

    def check_clean(self) -> None:
        """Raise unless everything went back to where it came from."""
        self.cache.check_invariants()
        statistics = self.cache.statistics()
        assert statistics.leaked_pages == 0, statistics
        assert statistics.transfers == 0
        replica = statistics.replica
        assert replica.num_requests == replica.num_waiting == 0, replica
        assert replica.promised_pages == 0
        left = leftovers(self.cache)
        assert left == {}, left
        self._check_tree()

    def _check_tree(self) -> None:
        """Raise unless each page in the tree is what its prefix means."""
        for (layout, namespace), node, tokens in self.nodes():
            for index, page in enumerate(node.pages[0]):
                position = node.start + index
                wanted = content(tokens, position, layout=layout, namespace=namespace)
                assert read(self.device, page) == wanted, (node, index)

    def nodes(self):
        """Yield what it means, the node and its tokens from the first, for each."""
        for name, root in self.replica._state.tree.roots.items():
            if name in MEANINGS:
                for node, prefix in _below(root, b""):
                    yield MEANINGS[name], node, array("i", prefix)


def _below(node, prefix: bytes):
    for child in node.children.values():
        yield child, prefix + child.edge
        yield from _below(child, prefix + child.edge)


@asynccontextmanager
async def scene(
    store: Store | None = None,
    *,
    num_pages: int = 8,
    device: Device | None = None,
    linker: Callable[[Device], Linker] | None = None,
    limits: Limits = LIMITS,
    check: bool = True,
    **arguments,
) -> AsyncIterator[Scene]:
    """Open a cache over poisoned pages; at its end nothing may be left behind."""
    device = device or CpuDevice(LAYOUT, num_pages)
    for pool in LAYOUT.pools:
        device.tensor(pool.name).fill_(POISON)
    log = arguments.pop("observer", None) or Log()
    loop = asyncio.get_running_loop()
    errors: list[dict[str, object]] = []
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    async with KVCache(
        LAYOUT,
        device=device,
        store=store,
        linker=None if linker is None else linker(device),
        limits=limits,
        observer=log,
        **arguments,
    ) as cache:
        view = Scene(cache, device, log, errors)
        yield view
        if check:
            await view.rest()
    view.cache.check_invariants()
    assert view.cache.statistics().transfers == 0
    loop.set_exception_handler(None)
    assert errors == []


def gate_device(num_pages: int = 8, *, is_open: bool = False) -> GateDevice:
    """Return a device as far away as an accelerator."""
    return GateDevice(CpuDevice(LAYOUT, num_pages), is_open=is_open)


def staged(store: Store, **arguments) -> Callable[[Device], Linker]:
    """Return what links a store through staging buffers, or in parts."""
    return lambda device: StoreLinker(store, device, **arguments)


async def turns(count: int) -> None:
    """Let other tasks run for so many turns of the loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@contextmanager
def unchanged(view: Scene) -> Iterator[None]:
    """Raise unless what is done inside changes nothing."""
    before = view.dump()
    yield
    assert view.dump() == before


class StubbornStore(GateStore):
    """Reads to the end, whatever becomes of the caller: as a thread does.

    The pages that it was lent are written when its gate opens, and not before.
    """

    async def get_into(self, keys, targets, layers=None):
        found = []

        async def read_to_end() -> None:
            with anyio.CancelScope(shield=True):
                await self.get_gate.pass_through()
                found.append(await self._inner.get_into(keys, targets, layers))

        async with anyio.create_task_group() as group:
            group.start_soon(read_to_end)
        return found[0]
