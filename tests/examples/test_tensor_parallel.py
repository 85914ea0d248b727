"""The ranks that share a model, as a reader runs them: one of them dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from examples.llm.model import Chunk, PagedLlama, tiny_llama

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.tensor_parallel", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_agree_or_all_say_so_in_time(num_ranks):
    done = run("--ranks", str(num_ranks))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ranks"] == num_ranks
    assert set(report["checked"].values()) == {True}, done.stdout
    assert ("a rank dies" in report["checked"]) == (num_ranks > 1)


def test_ranks_that_cannot_share_the_heads_are_refused():
    done = run("--ranks", "3")
    assert done.returncode == 2
    assert "--ranks must be 1, 2 or 4, not 3" in done.stderr
    with pytest.raises(ValueError, match=r"3 ranks cannot share \(4, 2, 96\) evenly"):
        tiny_llama().config.shard(3)


def test_the_shares_of_a_model_add_up_to_it():
    whole, num_ranks = tiny_llama(), 2
    chunk = Chunk(list(range(40)), 0, [0, 1, 2])
    pool = torch.zeros(3, 3, 2, 16, 2, 16)
    wanted = whole.forward([chunk], pool)
    meeting = threading.Barrier(num_ranks)
    parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks
    pools = [torch.zeros(3, 3, 2, 16, 1, 16) for _ in range(num_ranks)]
    found: list[torch.Tensor] = [torch.empty(0)] * num_ranks

    def share(rank: int) -> PagedLlama:
        def reduce(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            meeting.wait(10)
            total = sum(parts[1:], parts[0])
            meeting.wait(10)
            return total

        return whole.shard(rank, num_ranks, reduce)

    def forward(rank: int) -> None:
        found[rank] = share(rank).forward([chunk], pools[rank])

    threads = [threading.Thread(target=forward, args=(r,)) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(pools, dim=4), pool, rtol=1e-4, atol=1e-4)
