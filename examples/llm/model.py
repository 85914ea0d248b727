"""A Llama whose keys and values live in the pages of a device pool.

One forward takes a batch of chunks: a prompt, a piece of one, or the one token of a
decode step, each at an offset over its own page table. The matrix products see all
chunks at once; attention sees them one by one, through their pages only. So a page
restored from a store is as good as one just computed: same chunks, same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional

OnLayer = Callable[[int], object]
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    mlp_dim: int
    vocab_tokens: int
    max_tokens: int
    rope_theta: float
    norm_epsilon: float

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the weights that the model is made of: shape by name."""
        attention_dim = self.num_heads * self.head_dim
        qkv_dim = attention_dim + 2 * self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_tokens, self.hidden_dim),
            "norm": (self.hidden_dim,),
        }
        for layer in range(self.num_layers):
            shapes[f"{layer}.attention_norm"] = (self.hidden_dim,)
            shapes[f"{layer}.qkv"] = (qkv_dim, self.hidden_dim)
            shapes[f"{layer}.attention_out"] = (self.hidden_dim, attention_dim)
            shapes[f"{layer}.mlp_norm"] = (self.hidden_dim,)
            shapes[f"{layer}.gate_up"] = (2 * self.mlp_dim, self.hidden_dim)
            shapes[f"{layer}.mlp_out"] = (self.hidden_dim, self.mlp_dim)
        return shapes

    def shard(self, num_ranks: int) -> LlamaConfig:
        """Return the shape of one rank's share: some of the heads and of the MLP.

        Raises:
            ValueError: If the ranks cannot share evenly.
        """
        shares = (self.num_heads, self.num_kv_heads, self.mlp_dim)
        if any(share % num_ranks for share in shares):
            raise ValueError(f"{num_ranks} ranks cannot share {shares} evenly")
        heads, kv_heads, mlp_dim = (share // num_ranks for share in shares)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp_dim)


class Chunk(NamedTuple):
    """Tokens of one request to compute in one forward.

    Attributes:
        tokens: Token ids to compute, shape [num_tokens], at least one.
        start: Position of the first; the KV of all earlier ones is in the pages.
        pages: Page ids by position, enough for ``start + num_tokens`` tokens.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class PagedLlama:
    """A Llama with tied embeddings; every method may run in any thread.

    Args:
        config: The shape of the model.
        tensors: Weights by name, as :meth:`LlamaConfig.tensor_shapes` lists them.
        reduce: Sums what each rank's heads, or part of the MLP, add to the hidden
            state; for a model that is whole, nothing is to be summed.

    Raises:
        ValueError: If a weight is missing or its shape does not fit.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        reduce: Reduce = torch.Tensor.contiguous,
    ) -> None:
        for name, shape in config.tensor_shapes().items():
            found = tuple(tensors[name].shape) if name in tensors else "nothing"
            if found != shape:
                raise ValueError(f"weight {name} must have shape {shape}, got {found}")
        self.config = config
        self._tensors = tensors
        self._rotation = _rotation_table(config)
        self._reduce = reduce

    def shard(self, rank: int, num_ranks: int, reduce: Reduce) -> PagedLlama:
        """Return one rank's share of this model.

        Raises:
            ValueError: If the ranks cannot share evenly.
        """
        config = self.config.shard(num_ranks)
        tensors = dict(self._tensors)
        for layer in range(config.num_layers):
            for name, cut in _CUTS.items():
                whole = tensors[f"{layer}.{name}"]
                tensors[f"{layer}.{name}"] = cut(whole, self.config, rank, num_ranks)
        return PagedLlama(config, tensors, reduce=reduce)

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        pool: torch.Tensor,
        *,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Compute chunks: their KV goes into the pool, their logits come back.

        Args:
            chunks: At most one for each request; pages they write must not be shared.
            pool: All pages, shape [num_pages, num_layers, 2, page_tokens,
                num_kv_heads, head_dim]; read and written in place.
            on_layer: Called with each layer's number before that layer first touches
                the pool, from this thread; it may block until the layer is loaded.

        Returns:
            Logits of the last token of each chunk, shape [num_chunks, vocab_tokens].
        """
        weight, places = self._tensors, _places(chunks, pool)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        rotation = self._rotation[:, torch.cat([place.positions for place in places])]
        hidden = functional.embedding(tokens, weight["embedding"])
        for layer in range(self.config.num_layers):
            if on_layer is not None:
                on_layer(layer)
            normed = self._norm(hidden, f"{layer}.attention_norm")
            qkv = functional.linear(normed, weight[f"{layer}.qkv"])
            heads = self._attend(qkv, rotation, pool[:, layer], places)
            hidden = hidden + self._reduce(
                functional.linear(heads, weight[f"{layer}.attention_out"])
            )
            normed = self._norm(hidden, f"{layer}.mlp_norm")
            gate_up = functional.linear(normed, weight[f"{layer}.gate_up"])
            gate, up = gate_up.chunk(2, dim=-1)
            mlp = functional.silu(gate) * up
            hidden = hidden + self._reduce(
                functional.linear(mlp, weight[f"{layer}.mlp_out"])
            )
        last = [place.rows.stop - 1 for place in places]
        normed = self._norm(hidden[last], "norm")
        return functional.linear(normed, weight["embedding"])

    def _attend(
        self,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        pages: torch.Tensor,
        places: Sequence[_Place],
    ) -> torch.Tensor:
        """Write this layer's keys and values to their pages, then look at them all."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        values = heads[:, -config.num_kv_heads :]
        heads = _rotate(heads[:, : -config.num_kv_heads], rotation)
        queries, keys = heads[:, : config.num_heads], heads[:, config.num_heads :]
        outputs = []
        for place in places:
            place.write(pages[:, 0], keys)
            place.write(pages[:, 1], values)
            output = functional.scaled_dot_product_attention(
                queries[place.rows].transpose(0, 1)[None],
                place.read(pages[:, 0]).transpose(0, 1)[None],
                place.read(pages[:, 1]).transpose(0, 1)[None],
                attn_mask=place.mask,
                enable_gqa=config.num_heads != config.num_kv_heads,
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[name]
        return functional.rms_norm(
            hidden, weight.shape, weight, self.config.norm_epsilon
        )


class _Place(NamedTuple):
    """Where a chunk lies in the batch and in the pool, and what it may look at."""

    rows: slice
    positions: torch.Tensor
    page_of_row: torch.Tensor
    offset_of_row: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor | None

    def write(self, pages: torch.Tensor, batch: torch.Tensor) -> None:
        """Put the chunk's rows of a batch, [num_rows, heads, dim], into its pages."""
        pages[self.page_of_row, self.offset_of_row] = batch[self.rows]

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Return a copy of what the pages hold of positions 0 to the chunk's end.

        What lies behind the end in the last page is not looked at, not even masked:
        it may be NaN.
        """
        end = int(self.positions[-1]) + 1
        return pages.index_select(0, self.pages).flatten(0, 1)[:end]


def _places(chunks: Sequence[Chunk], pool: torch.Tensor) -> list[_Place]:
    page_tokens, places, row = pool.shape[3], [], 0
    for chunk in chunks:
        rows = slice(row, row + len(chunk.tokens))
        end = chunk.start + len(chunk.tokens)
        positions = torch.arange(chunk.start, end)
        pages = torch.tensor(chunk.pages[: -(-end // page_tokens)])
        page, offset = pages[positions // page_tokens], positions % page_tokens
        # A single token may look at all there is.
        mask = torch.arange(end) <= positions[:, None] if len(positions) > 1 else None
        places.append(_Place(rows, positions, page, offset, pages, mask))
        row = rows.stop
    return places


def _cut_qkv(
    whole: torch.Tensor, config: LlamaConfig, rank: int, num_ranks: int
) -> torch.Tensor:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    sizes = [count * config.head_dim for count in (heads, kv_heads, kv_heads)]
    return torch.cat([p.chunk(num_ranks)[rank] for p in whole.split(sizes)])


def _cut_gate_up(
    whole: torch.Tensor, _: LlamaConfig, rank: int, num_ranks: int
) -> torch.Tensor:
    return torch.cat([part.chunk(num_ranks)[rank] for part in whole.chunk(2)])


def _cut_columns(
    whole: torch.Tensor, _: LlamaConfig, rank: int, num_ranks: int
) -> torch.Tensor:
    return whole.chunk(num_ranks, dim=1)[rank].contiguous()


_CUTS = {
    "qkv": _cut_qkv,
    "attention_out": _cut_columns,
    "gate_up": _cut_gate_up,
    "mlp_out": _cut_columns,
}


def _rotation_table(config: LlamaConfig) -> torch.Tensor:
    """Return cosines and sines, shape [2, max_tokens, 1, head_dim // 2]."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_tokens).float(), config.rope_theta**-exponents
    )
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def _rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def tiny_llama(seed: int = 0, *, num_kv_heads: int = 2) -> PagedLlama:
    """Return a small model of random weights, the same for the same seed."""
    config = LlamaConfig(
        num_layers=3,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        hidden_dim=64,
        mlp_dim=96,
        vocab_tokens=512,
        max_tokens=2048,
        rope_theta=10_000.0,
        norm_epsilon=1e-5,
    )
    generator = torch.Generator().manual_seed(seed)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in config.tensor_shapes().items():
            scale = 1.0 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
            yield name, torch.randn(shape, generator=generator) * scale

    return PagedLlama(config, dict(weights()))
