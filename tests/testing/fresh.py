"""The same seeds in fresh processes: whether a run depends on anything but its seed."""

from __future__ import annotations

import os
import subprocess
import sys

_PRINT_LOGS = """
import hashlib, sys
from asyncache.testing.simulation import draw, simulate
num_seeds, num_ranks = map(int, sys.argv[1:])
for seed in range(num_seeds):
    log = simulate(draw(seed, num_ranks), is_logged=True).log
    print(len(log), hashlib.sha256("\\n".join(log).encode()).hexdigest())
"""


def outputs(num_seeds: int, num_ranks: int) -> set[bytes]:
    """Return what two processes, whose hashes differ, tell of the first seeds' logs."""
    return {
        subprocess.run(
            [sys.executable, "-c", _PRINT_LOGS, str(num_seeds), str(num_ranks)],
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in (0, 1)
    }
