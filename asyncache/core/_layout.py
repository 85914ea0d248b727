"""What a page is: the pools of a model, the bytes of their pages, and their identity.

A pool is one kind of what layers keep of a prefix. It says which of its pages a prefix
needs: attention needs them all, a sliding window only the trailing ones, a recurrent
state only the one at its end. Everything that changes the meaning of a page's bytes is
part of ``KVLayout.identity``.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHARD = re.compile(r"all|[0-9]{1,9}of[0-9]{1,9}")


class Coverage(Enum):
    """Which pages of a pool a prefix needs before it may be served."""

    ALL_PAGES = auto()
    TRAILING = auto()
    ENDPOINT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPool:
    """Keys and values of full-attention layers: a prefix needs every page.

    Args:
        name: Name of the pool in page tables and store keys, ``[a-z][a-z0-9_]*``.
        num_layers: Layers that keep state in this pool.
        num_kv_heads: Heads of keys and values on this rank.
        head_dim: Elements a head.
        dtype: Element type by name, such as "bfloat16".
        num_parts: 2 for keys and values, 1 for one latent vector a token.
        replicated: Whether every rank holds the same bytes, so that the store keeps
            one copy for all of them.
    """

    name: str = "kv"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_parts: int = 2
    replicated: bool = False

    def __post_init__(self) -> None:
        _check_pool(self)

    @property
    def coverage(self) -> Coverage:
        """Which of its pages a prefix needs."""
        return Coverage.ALL_PAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPool:
    """Keys and values of sliding-window layers: a prefix needs its trailing pages.

    Args:
        window_tokens: Tokens that a layer looks back; whole pages are kept.

    The other arguments are those of :class:`AttentionPool`.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window_tokens: int
    num_parts: int = 2
    replicated: bool = False

    def __post_init__(self) -> None:
        _check_pool(self)
        check_at_least(1, "window_tokens", self.window_tokens)

    @property
    def coverage(self) -> Coverage:
        """Which of its pages a prefix needs."""
        return Coverage.TRAILING


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """States of recurrent layers: a prefix needs the one at its end.

    Linear attention is one of them. The unit is a *slot* in place of a page: the state
    after some number of tokens. A request has one of its own, which the model
    overwrites as it goes; the tree keeps copies where a checkpoint was taken.

    Args:
        name: Name of the pool in store keys, ``[a-z][a-z0-9_]*``.
        num_layers: Layers that keep a state in this pool.
        shape: Shape of one layer's state on this rank, in elements.
        dtype: Element type by name, such as "float32".
        replicated: Whether every rank holds the same bytes, so that the store keeps
            one copy for all of them.
    """

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: str
    replicated: bool = False

    def __post_init__(self) -> None:
        _check_name_and_dtype(self.name, self.dtype)
        check_at_least(1, "num_layers", self.num_layers)
        _check_shape(self.shape)

    @property
    def coverage(self) -> Coverage:
        """Which of its slots a prefix needs."""
        return Coverage.ENDPOINT


Pool = AttentionPool | WindowPool | StatePool


@dataclass(frozen=True, slots=True)
class PageSpace:
    """What the bytes of one pool's pages are, on one shard: the tail of a store key.

    Two spaces with different fields never share a key in any store.

    Args:
        pool: Name of the pool.
        shard: Which part of the heads this rank holds, such as "0of2"; "all" when
            every rank holds the same bytes.
        dtype: Element type by name.
        shape: Shape of one page, [num_layers, num_parts, page_tokens, num_kv_heads,
            head_dim], or of one slot, [num_layers, *shape].

    Raises:
        TypeError: If the shape is not a tuple of ints.
        ValueError: If a field is no such thing.
    """

    pool: str
    shard: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        # Stores take `name` for a file name.
        _check_name_and_dtype(self.pool, self.dtype)
        if not _SHARD.fullmatch(self.shard):
            raise ValueError(f"a shard must match {_SHARD.pattern}, not {self.shard!r}")
        _check_shape(self.shape)

    @property
    def num_layers(self) -> int:
        """Layer slices in a page."""
        return self.shape[0]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's slice of a page."""
        count = ITEM_BYTES[self.dtype]
        for extent in self.shape[1:]:
            count *= extent
        return count

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def name(self) -> str:
        """The space in clear; equal names mean equal spaces."""
        shape = "x".join(map(str, self.shape))
        return f"{self.pool}-{self.shard}-{self.dtype}-{shape}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return the space that has this name.

        Raises:
            ValueError: If none has.
        """
        try:
            pool, shard, dtype, shape = name.split("-")
            space = cls(pool, shard, dtype, tuple(map(int, shape.split("x"))))
            if space.name == name:  # int() reads more than we write
                return space
        except ValueError as error:
            raise ValueError(f"{name!r:.200} is no space's name: {error}") from error
        raise ValueError(f"{name!r:.200} is no space's name, {space.name!r:.200} is")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """All pools of a model, and the identity of what they hold.

    Args:
        model: Name of the weights; pages of different models never mix.
        revision: Version of the weights, adapters baked in included.
        page_tokens: Tokens a page, the same for every pool.
        pools: At least one :class:`AttentionPool`; names must differ.

    Raises:
        ValueError: If a number is below 1, names clash, or no pool is full attention.
    """

    model: str
    revision: str = ""
    page_tokens: int
    pools: tuple[Pool, ...]
    identity: bytes = field(init=False, repr=False, compare=False)
    """What the bytes of a page mean, framed so that different layouts differ.

    The same on every rank: which shard a rank holds is not part of it.
    """

    def __post_init__(self) -> None:
        for name in ("model", "revision"):
            if not isinstance(getattr(self, name), str):
                kind = type(getattr(self, name)).__name__
                raise TypeError(f"{name} must be a str, not {kind}")
        check_at_least(1, "page_tokens", self.page_tokens)
        if not isinstance(self.pools, tuple):
            raise TypeError(f"pools must be a tuple, not {type(self.pools).__name__}")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, got {names}")
        if all(pool.coverage is not Coverage.ALL_PAGES for pool in self.pools):
            raise ValueError(f"a layout needs an AttentionPool, got pools {names}")
        # Every request asks for it, and it never changes.
        object.__setattr__(self, "identity", self._frame_pools())

    def _frame_pools(self) -> bytes:
        fields = [str(self.page_tokens)]
        for pool in self.pools:
            if isinstance(pool, StatePool):
                # No window is "state", and it tells how many extents follow.
                kind, shape = "state", (len(pool.shape), *pool.shape)
            else:
                kind = str(pool.window_tokens if isinstance(pool, WindowPool) else 0)
                shape = (pool.num_parts, pool.num_kv_heads, pool.head_dim)
            fields += [pool.name, pool.dtype, kind, str(pool.replicated)]
            fields += map(str, (pool.num_layers, *shape))
        return frame(*(text.encode() for text in fields))

    def window_pages(self, pool: Pool) -> int:
        """Return how many trailing pages a prefix needs of a window or a state pool."""
        if isinstance(pool, StatePool):
            return 1
        assert isinstance(pool, WindowPool)
        return -(-pool.window_tokens // self.page_tokens)

    def space(self, pool: Pool, *, rank: int = 0, num_ranks: int = 1) -> PageSpace:
        """Return what the bytes of this pool's pages are on one rank."""
        shape: tuple[int, ...]
        if isinstance(pool, StatePool):
            shape = pool.shape
        else:
            shape = (
                pool.num_parts,
                self.page_tokens,
                pool.num_kv_heads,
                pool.head_dim,
            )
        shard = "all" if pool.replicated else f"{rank}of{num_ranks}"
        return PageSpace(pool.name, shard, pool.dtype, (pool.num_layers, *shape))


def frame(*fields: bytes) -> bytes:
    """Join fields so that no two different lists of fields give the same bytes."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def _check_pool(pool: AttentionPool | WindowPool) -> None:
    _check_name_and_dtype(pool.name, pool.dtype)
    for name in ("num_layers", "num_kv_heads", "head_dim", "num_parts"):
        check_at_least(1, name, getattr(pool, name))


def _check_shape(shape: tuple[int, ...]) -> None:
    if not isinstance(shape, tuple):
        raise TypeError(f"shape must be a tuple, not {type(shape).__name__}")
    if not shape:
        raise ValueError("shape must have at least one extent, got ()")
    for extent in shape:
        check_at_least(1, "an extent of shape", extent)


def _check_name_and_dtype(name: str, dtype: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a pool's name must match {_NAME.pattern}, not {name!r}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {sorted(ITEM_BYTES)}, not {dtype!r}")


def check_at_least(least: int, name: str, value: int) -> None:
    """Raise unless a value is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
