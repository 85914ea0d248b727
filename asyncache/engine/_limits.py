"""Every bound of a cache in one value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from asyncache.core import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of queues, waits and retries; all of them are positive and finite.

    Args:
        requests: Requests open at once.
        slots: Loads and offloads in the ballot at once; more wait their turn.
        offloads: Offloads at once, those included that wait for room; fewer than
            ``slots``.
        offload_attempts: Failures after which pages are not offered to the store again
            until another commit walks them.
        mask_ints: Ints of the ballot that lookups share where a layout has windows.
        restore_s: Seconds that a restore may take where the call names no deadline.
        gate_s: Seconds after which a layer's gate opens whatever happens; the load is
            given up then.
        drain_s: Seconds that :meth:`KVCache.drain` may take where the call names none.
        close_s: Seconds that :meth:`KVCache.aclose` waits for transfers to stop.
        overdue_s: Seconds after which an event tells of a transfer or a forward that
            still runs: what it touches stays its own until it ends.
        retry_s: Seconds before a failed offload is tried again; doubled each time.
        breaker_failures: Transfers that must fail in a row before the store is left
            alone for ``breaker_s``: lookups miss at once, offloads wait.
        breaker_s: Seconds until a store that failed, or is full, is tried again.
        step_s: Seconds without a step after which nobody waits any longer for one that
            agrees on what is due; with several ranks.
        barrier_s: Seconds that a rank waits for the slowest one's part, from its own
            call on, before all is over. More than ranks are ever apart.

    Raises:
        ValueError: If a bound is not positive, not finite, or against another.
        TypeError: If a bound is not a number.
    """

    requests: int = 256
    slots: int = 64
    offloads: int = 8
    offload_attempts: int = 3
    mask_ints: int = 4096
    restore_s: float = 30.0
    gate_s: float = 30.0
    drain_s: float = 60.0
    close_s: float = 10.0
    overdue_s: float = 30.0
    retry_s: float = 0.25
    breaker_failures: int = 3
    breaker_s: float = 5.0
    step_s: float = 5.0
    barrier_s: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), whole=field.type == "int")
        if self.offloads >= self.slots:
            raise ValueError(
                f"offloads must be below slots, or loads might find no place:"
                f" {self.offloads} and {self.slots}"
            )

    def bounds(
        self,
        *,
        write_threshold: int,
        low_water: int = 0,
        launches: bool = False,
        aborts_by_call: bool = False,
    ) -> Bounds:
        """Return the part that the core keeps, with what else it has to know."""
        return Bounds(
            requests=self.requests,
            slots=self.slots,
            offloads=self.offloads,
            offload_attempts=self.offload_attempts,
            mask_ints=self.mask_ints,
            write_threshold=write_threshold,
            low_water=low_water,
            launches=launches,
            aborts_by_call=aborts_by_call,
        )


def _check(name: str, value: float, *, whole: bool) -> None:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an int" if whole else "a number"
        raise TypeError(f"{name} must be {kind}, not {type(value).__name__}")
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be positive and finite, not {value}")


def check_deadline(name: str, value: float | None, default: float) -> float:
    """Return a deadline in seconds from now, at least 0 and finite.

    Raises:
        ValueError: If it is negative, NaN or infinite.
        TypeError: If it is not a number.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, not {value}")
    return float(value)
