"""The paged Llama: pages are all that it knows of the past, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.nn import functional

from examples.llm.model import Chunk, LlamaConfig, PagedLlama, tiny_llama

PAGE_TOKENS = 16
NUM_PAGES = 12
PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(9 * PAGE_TOKENS + 5)]
PREFIX_TOKENS = 6 * PAGE_TOKENS
UPWARDS = list(range(NUM_PAGES))
DOWNWARDS = UPWARDS[::-1]


@pytest.fixture
def model() -> PagedLlama:
    return tiny_llama(seed=1)


@pytest.fixture(params=[1, 2], ids="threads={}".format)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def poisoned_pool(model: PagedLlama) -> torch.Tensor:
    config = model.config
    shape = (NUM_PAGES, config.num_layers, 2, PAGE_TOKENS)
    return torch.full((*shape, config.num_kv_heads, config.head_dim), math.nan)


def run(
    model: PagedLlama,
    pool: torch.Tensor,
    pages: Sequence[int],
    *,
    start: int = 0,
    end: int = len(PROMPT),
    chunk_tokens: int = 64,
) -> torch.Tensor:
    """Compute PROMPT[start:end] in chunks; return the last chunk's logits."""
    for first in range(start, end, chunk_tokens):
        tokens = PROMPT[first : min(first + chunk_tokens, end)]
        logits = model.forward([Chunk(tokens, first, pages)], pool)
    return logits[0]


def prefix_bytes(model: PagedLlama) -> list[bytes]:
    """Compute the prefix in a pool of its own; return what a store sees of it."""
    pool = poisoned_pool(model)
    run(model, pool, UPWARDS, end=PREFIX_TOKENS)
    return [page.numpy().tobytes() for page in pool[: PREFIX_TOKENS // PAGE_TOKENS]]


def put_back(pool: torch.Tensor, pages: Sequence[int], contents: list[bytes]) -> None:
    for page, content in zip(pages, contents, strict=False):
        restored = torch.frombuffer(bytearray(content), dtype=pool.dtype)
        pool[page] = restored.view(pool.shape[1:])


def reference_logits(model: PagedLlama, tokens: Sequence[int]) -> torch.Tensor:
    """Compute the last token's logits without pages, chunks or a fused attention."""
    config, weight = model.config, model._tensors
    hidden = weight["embedding"][list(tokens)]
    for layer in range(config.num_layers):
        normed = reference_norm(hidden, weight[f"{layer}.attention_norm"], config)
        heads = (normed @ weight[f"{layer}.qkv"].T).unflatten(1, (-1, config.head_dim))
        queries, keys, values = heads.split(
            [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        queries, keys = rotated(queries, config), rotated(keys, config)
        outputs = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = queries[:, head] @ keys[:, shared].T / config.head_dim**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
            outputs.append(scores.softmax(dim=1) @ values[:, shared])
        attended = torch.cat(outputs, dim=1)
        hidden = hidden + attended @ weight[f"{layer}.attention_out"].T
        normed = reference_norm(hidden, weight[f"{layer}.mlp_norm"], config)
        gate, up = (normed @ weight[f"{layer}.gate_up"].T).chunk(2, dim=1)
        hidden = hidden + (functional.silu(gate) * up) @ weight[f"{layer}.mlp_out"].T
    return reference_norm(hidden[-1], weight["norm"], config) @ weight["embedding"].T


def reference_norm(
    hidden: torch.Tensor, weight: torch.Tensor, config: LlamaConfig
) -> torch.Tensor:
    square = hidden.pow(2).mean(-1, keepdim=True)
    return hidden / (square + config.norm_epsilon).sqrt() * weight


def rotated(heads: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Turn each pair of elements as one complex number."""
    half = config.head_dim // 2
    speeds = config.rope_theta ** -(torch.arange(half) / half)
    angles = torch.arange(len(heads))[:, None, None] * speeds
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.usefixtures("num_threads")
def test_restored_pages_give_the_very_bits_that_resident_ones_give(
    model: PagedLlama,
) -> None:
    resident = poisoned_pool(model)
    run(model, resident, UPWARDS, end=PREFIX_TOKENS)
    expected = run(model, resident, UPWARDS, start=PREFIX_TOKENS)

    fresh = poisoned_pool(model)
    put_back(fresh, DOWNWARDS, prefix_bytes(model))
    logits = run(model, fresh, DOWNWARDS, start=PREFIX_TOKENS)

    assert torch.equal(logits, expected)
    # The suffix's pages are bitwise equal too, so that decoding goes on the same.
    last = (len(PROMPT) - 1) // PAGE_TOKENS
    assert torch.equal(fresh[DOWNWARDS[last - 1]], resident[UPWARDS[last - 1]])


def test_a_damaged_page_changes_the_logits(model: PagedLlama) -> None:
    contents = prefix_bytes(model)
    whole, damaged = poisoned_pool(model), poisoned_pool(model)
    put_back(whole, DOWNWARDS, contents)
    contents[2] = bytes(64) + contents[2][64:]
    put_back(damaged, DOWNWARDS, contents)

    expected = run(model, whole, DOWNWARDS, start=PREFIX_TOKENS)
    assert not torch.equal(
        run(model, damaged, DOWNWARDS, start=PREFIX_TOKENS), expected
    )


def test_a_page_that_was_never_restored_shows_as_nan(model: PagedLlama) -> None:
    pool = poisoned_pool(model)
    put_back(pool, DOWNWARDS, prefix_bytes(model)[:-1])
    assert run(model, pool, DOWNWARDS, start=PREFIX_TOKENS).isnan().all()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 512])
def test_pages_and_chunks_agree_with_a_plain_forward(
    model: PagedLlama, chunk_tokens: int
) -> None:
    logits = run(model, poisoned_pool(model), DOWNWARDS, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(
        logits, reference_logits(model, PROMPT), rtol=1e-4, atol=1e-4
    )


def test_a_batch_gives_what_its_chunks_give_alone(model: PagedLlama) -> None:
    def chunks() -> list[Chunk]:
        return [
            Chunk(PROMPT[40:41], 40, UPWARDS[:3]),
            Chunk(PROMPT[32:60], 32, UPWARDS[3:7]),
            Chunk(PROMPT[:20], 0, UPWARDS[7:9]),
            Chunk(PROMPT[33:34], 33, UPWARDS[9:12]),
        ]

    together, alone = poisoned_pool(model), poisoned_pool(model)
    for pool in (together, alone):
        for chunk in chunks():
            if chunk.start:
                before = Chunk(PROMPT[: chunk.start], 0, chunk.pages)
                model.forward([before], pool)

    batch = model.forward(chunks(), together)
    single = torch.cat([model.forward([chunk], alone) for chunk in chunks()])

    torch.testing.assert_close(batch, single, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_each_layer_is_announced_before_it_touches_the_pool(model: PagedLlama) -> None:
    pool, untouched = poisoned_pool(model), []

    def on_layer(layer: int) -> None:
        untouched.append((layer, bool(pool[:, layer].isnan().all())))

    model.forward([Chunk(PROMPT[:20], 0, UPWARDS)], pool, on_layer=on_layer)
    assert untouched == [(layer, True) for layer in range(model.config.num_layers)]


def test_a_seed_names_a_model() -> None:
    first, same, other = (tiny_llama(seed)._tensors for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embedding"], other["embedding"])


def test_greedy_text_of_the_tiny_model_does_not_repeat_itself(
    model: PagedLlama,
) -> None:
    """Else equal tokens would prove little in the tests of the loop."""
    pool, tokens, start = poisoned_pool(model), PROMPT[:20], 0
    written: list[int] = []
    while len(written) < 40:
        logits = model.forward([Chunk(tokens, start, UPWARDS)], pool)
        start += len(tokens)
        tokens = [int(logits[0].argmax())]
        written += tokens
    assert len(set(written)) > 20


def test_a_weight_of_the_wrong_shape_is_refused(model: PagedLlama) -> None:
    tensors = dict(model._tensors, norm=torch.ones(3))
    with pytest.raises(ValueError, match=r"weight norm must have shape \(64,\), got"):
        PagedLlama(model.config, tensors)
