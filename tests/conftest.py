"""What holds for every test: nothing blocks the event loop, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBusterFunction, blockbuster_ctx
from cuda.bindings import driver
from hypothesis import settings

from tests.softcuda import driver_line

# No profile has a deadline: a busy machine is not a bug.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=50,
    stateful_step_count=30,
    print_blob=True,
)
settings.register_profile(
    "long", deadline=None, max_examples=2_000, stateful_step_count=100
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

OPEN_FILES = Path("/proc/self/fd")
# A worker thread ends by itself, a little after the loop that used it.
GRACE_S = 5.0


# A shell that starts this in the background has it ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return driver_line()


@pytest.fixture(autouse=True)
def _nothing_blocks_the_event_loop() -> Iterator[None]:
    with blockbuster_ctx("asyncache") as blockbuster:
        for name in ("cuCtxSynchronize", "cuEventSynchronize", "cuStreamSynchronize"):
            function = BlockBusterFunction(driver, name, scanned_modules="asyncache")
            blockbuster.functions[name] = function.activate()
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    threads = set(threading.enumerate())
    files = open_files(tmp_path_factory.getbasetemp())
    yield
    left = surviving_threads(threads)
    assert not left, f"threads still run: {left}"
    left = open_files(tmp_path_factory.getbasetemp()) - files
    assert not left, f"files still open: {left}"


def surviving_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """Return the threads started since ``before`` that do not end by themselves."""
    deadline = time.monotonic() + GRACE_S
    # A foreign thread that once called into Python is not ours to end.
    started = {
        thread
        for thread in set(threading.enumerate()) - before
        if not isinstance(thread, threading._DummyThread)
    }
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in started if thread.is_alive()}


def open_files(folder: Path) -> set[tuple[str, str]]:
    """Return descriptor and path of the files under ``folder`` that are open here."""
    found = set()
    for entry in OPEN_FILES.iterdir() if OPEN_FILES.exists() else ():
        try:
            path = str(entry.readlink())
        except FileNotFoundError:  # the descriptor that listed the others
            continue
        if path.startswith(f"{folder}/"):
            found.add((entry.name, path))
    return found
