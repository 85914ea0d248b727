"""From the end of a copy to the coroutine that waits for it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

from tests.bench import wakes
from tests.gpu.report import Line, Run

IN_FLIGHT = (1, 16, 256)
NUM_SAMPLES = 4096
NUM_SMALL_SAMPLES = 32


def run(run: Run) -> Iterator[Line]:
    """Wait for copies on each loop, with one in flight and with many."""
    num_samples = NUM_SMALL_SAMPLES if run.is_small else NUM_SAMPLES
    loops = list(_loops())
    parts = len(loops) * len(IN_FLIGHT)
    for name, new_loop in loops:
        for count in IN_FLIGHT:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                found = runner.run(
                    wakes.measure(
                        run.gpu,
                        num_in_flight=count,
                        num_rounds=max(1, num_samples // count),
                        budget_s=run.share(parts),
                    )
                )
            parts -= 1
            yield from _lines(f"{name}, {count} in flight", found)
    if len(loops) == 1:
        yield Line(what="uvloop", note="not run: it is not installed")


def _loops() -> Iterator[tuple[str, Callable[[], asyncio.AbstractEventLoop]]]:
    yield "asyncio", asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        yield "uvloop", uvloop.new_event_loop


def _lines(setting: str, found: wakes.Found) -> Iterator[Line]:
    bare = found.bare.median_us
    for what, latencies, ratio, note in (
        ("start_write().wait()", found.ours, found.ours.median_us / bare, "to bare"),
        ("bare thread, cuEventSynchronize", found.bare, None, ""),
        ("spinning cuEventQuery", found.spinning, None, "zero, on a GPU"),
    ):
        yield Line(
            what=f"{setting}: {what}",
            median_us=latencies.median_us,
            p99_us=latencies.p99_us,
            ratio=ratio,
            note=note,
        )
