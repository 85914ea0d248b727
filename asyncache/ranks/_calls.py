"""What every group of several ranks refuses, in the same words."""

from __future__ import annotations

from array import array

from asyncache.core import ClosedError, OrderError, RankError

# Gloo counts whole milliseconds, and takes 0 for "without end".
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless a rank can be waited for so long."""
    if not MIN_TIMEOUT_S <= timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be in [{MIN_TIMEOUT_S:g}, {MAX_TIMEOUT_S:g}], "
            f"not {timeout_s}"
        )


def check_call(
    vector: array[int],
    *,
    rank: int,
    has_left: bool,
    is_waiting: bool,
    over_because: str | None,
) -> None:
    """Raise unless a rank may call ``all_min(vector)`` now.

    Raises:
        ValueError: If the items are not int32.
        ClosedError: If the rank has left.
        OrderError: If it is still in another call.
        RankError: If the group is over.
    """
    if vector.typecode != "i":
        raise ValueError(f"items must be int32, 'i', not {vector.typecode!r}")
    if has_left:
        raise left(rank)
    if is_waiting:
        raise OrderError(f"rank {rank} is still in another call of all_min()")
    if over_because is not None:
        raise RankError(over_because)


def left(rank: int) -> ClosedError:
    """Return the error of a rank that calls, or still waits, after it left."""
    return ClosedError(f"rank {rank} has left its group")
