"""Layers of a transformer over pages, of a realistic size: work to hide a load under.

It computes nothing worth reading: its weights are noise, one set for all layers, and
each new token looks at all others. But it costs what a prefill costs, and the same
pages give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large it is.

    Args:
        num_layers: Layers.
        hidden_dim: Width of a token.
        mlp_dim: Width within the MLP.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        num_new_tokens: Tokens to compute.
        num_old_tokens: Tokens before them, whose keys and values are in the pages.
    """

    num_layers: int
    hidden_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    num_new_tokens: int
    num_old_tokens: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_dim // self.num_heads


# Like an 8B model; load and compute take about as long as each other.
LARGE = Shape(
    num_layers=16,
    hidden_dim=4096,
    mlp_dim=14336,
    num_heads=32,
    num_kv_heads=8,
    num_new_tokens=2048,
    num_old_tokens=4096,
)
SMALL = Shape(
    num_layers=4,
    hidden_dim=64,
    mlp_dim=128,
    num_heads=4,
    num_kv_heads=2,
    num_new_tokens=8,
    num_old_tokens=64,
)


class Model:
    """The layers, on a torch device; the pool is page-first, of one part each."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def noise(*sizes: int) -> torch.Tensor:
            made = torch.randn(sizes, generator=generator, device=device)
            return (made / sizes[-1] ** 0.5).to(torch.bfloat16)

        kv_dim = 2 * shape.num_kv_heads * shape.head_dim
        self._qkv = noise(shape.hidden_dim + kv_dim, shape.hidden_dim)
        self._out = noise(shape.hidden_dim, shape.hidden_dim)
        self._gate_up = noise(2 * shape.mlp_dim, shape.hidden_dim)
        self._down = noise(shape.hidden_dim, shape.mlp_dim)
        self._tokens = noise(shape.num_new_tokens, shape.hidden_dim)

    @torch.inference_mode()
    def forward(
        self, pool: torch.Tensor, pages: torch.Tensor, on_layer: Callable[[int], object]
    ) -> torch.Tensor:
        """Return hidden states, shape [num_new_tokens, hidden_dim].

        Args:
            pool: All pages, shape [num_pages, num_layers, 2, page_tokens,
                num_kv_heads, head_dim].
            pages: Page ids of the old tokens, shape [num_pages], on the same device.
            on_layer: Called with a layer before that layer reads its pages.
        """
        hidden = self._tokens
        for layer in range(self.shape.num_layers):
            qkv = functional.linear(self._norm(hidden), self._qkv)
            on_layer(layer)
            heads = self._attend(qkv, pool[:, layer].index_select(0, pages))
            hidden = hidden + functional.linear(heads, self._out)
            gate_up = functional.linear(self._norm(hidden), self._gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, self._down)
        return hidden

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:])

    def _attend(self, qkv: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        queries, *new = heads.split(sizes, dim=1)
        keys, values = (
            torch.cat([old[:, part].flatten(0, 1), new[part]]) for part in (0, 1)
        )
        output = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (queries, keys, values)),
            enable_gqa=True,
        )
        return output[0].transpose(0, 1).flatten(1)
