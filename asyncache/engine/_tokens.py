"""Tokens as embedders have them: sequences, buffers, torch tensors."""

from __future__ import annotations

import torch

from asyncache.core import Tokens, pack_tokens

TokenSource = Tokens | torch.Tensor


def pack(tokens: TokenSource) -> bytes:
    """Return token ids as packed little-endian int32.

    Raises:
        TypeError: If they are not integers, or on another device than the CPU.
        ValueError: If there are none, one is outside [0, 2**31), or they are not
            one-dimensional.
    """
    if not isinstance(tokens, torch.Tensor):
        return pack_tokens(tokens)
    if tokens.device.type != "cpu":
        raise TypeError(f"tokens must be on the CPU, not on {tokens.device}")
    if tokens.dtype.is_floating_point or tokens.dtype in {torch.bool, torch.complex64}:
        raise TypeError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {tokens.ndim}")
    return pack_tokens(tokens.tolist())
