"""Tokens and their numbers as embedders have them, checked before anything changes."""

from __future__ import annotations

from operator import index

import torch

from asyncache.core import MAX_TOKEN, Tokens, pack_tokens

TokenSource = Tokens | torch.Tensor
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}


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
    if tokens.dtype not in _INTEGERS:
        raise TypeError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {tokens.ndim}")
    return pack_tokens(tokens.tolist())


def check_count(name: str, value: int, *, least: int = 0, most: int = MAX_TOKEN) -> int:
    """Return a number, given as an int or as what numpy has for one.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is below ``least`` or above ``most``.
    """
    try:
        count = index(value)
    except TypeError:
        count = True  # refused below, where the message is
    if isinstance(value, bool) or isinstance(count, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if count > most:
        raise ValueError(f"{name} must be at most {most}, not {value}")
    return count
