"""One model on several processes, one cache on each, and clients on the first.

``make ranks`` runs it: each process has a share of the model's heads and the pages of
just these, in a store of its own. The first process has the clients; its loop sends
what they want to all, and all make the same calls, run the model, and step. Then one
rank's store loses what it had, a client hangs up, and a process dies. The last line is
JSON: what was checked, and how long it took.

Under ``torchrun --nproc-per-node N -m examples.tensor_parallel`` it takes the ranks as
they are; by itself it starts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist

from asyncache import (
    AttentionPool,
    CpuDevice,
    FileStore,
    KVCache,
    KVLayout,
    Limits,
    RankError,
    TorchGroup,
)
from asyncache.testing import FaultyStore
from examples.llm.model import Chunk, LlamaConfig, PagedLlama, tiny_llama
from examples.llm.ranks import ANSWER, Loop

PAGE_TOKENS = 16
NUM_PAGES = 256
BARRIER_S = 5.0
PROMPTS = [
    [7 * place % 500 for place in range(100)],
    [7 * place % 500 for place in range(80)] + [11, 12, 13, 14, 15],
]


# What is shown.


async def show(loop: Loop, reference: PagedLlama) -> dict[str, Any]:
    """Be the clients of all ranks, and check what they get."""
    wanted = [generate_alone(reference, prompt) for prompt in PROMPTS]
    checked: dict[str, Any] = {}

    async def everyone() -> tuple[list[list[int]], list[int]]:
        loop.hits.clear()
        answers = [await loop.answer(prompt) for prompt in PROMPTS]
        return answers, loop.hits

    answers, hits = await everyone()
    say(f"cold: hits {hits}, answers as of one process: {answers == wanted}")
    checked["cold"] = answers == wanted and hits == [0, 80]

    await loop.tell("reset")
    answers, hits = await everyone()
    say(f"restored from each rank's files: hits {hits}, same: {answers == wanted}")
    checked["restored"] = answers == wanted and hits == [96, 80]

    await loop.tell("reset")
    await loop.tell("lose")
    answers, hits = await everyone()
    await loop.tell("mend")
    say(f"one rank's store is corrupt: hits {hits}, same: {answers == wanted}")
    checked["one rank's load fails"] = answers == wanted and hits == [0, 80]

    await _hang_up(loop)
    pages = await loop.tell("look")
    say(f"a client hung up: pages by rank {pages}")
    equal = all(found == pages[0] for found in pages)
    checked["cancelled"] = equal and pages[0]["request"] == 0
    return checked


async def _hang_up(loop: Loop) -> None:
    """Leave in the middle of an answer, as a handler that is cancelled."""
    num_tokens = 0
    with anyio.CancelScope() as scope:
        async for _ in loop.generate(PROMPTS[0]):
            num_tokens += 1
            if num_tokens == ANSWER // 2:
                scope.cancel()


def generate_alone(model: PagedLlama, prompt: Sequence[int]) -> list[int]:
    """Return the answer of a whole model, without a cache."""
    config, tokens = model.config, list(prompt)
    num_pages = -(-(len(prompt) + ANSWER) // PAGE_TOKENS)
    pool = torch.zeros(pool_shape(config, num_pages))
    start = 0
    for _ in range(ANSWER):
        chunk = Chunk(tokens[start:], start, tuple(range(num_pages)))
        start = len(tokens)
        tokens.append(int(model.forward([chunk], pool).argmax()))
    return tokens[len(prompt) :]


def pool_shape(config: LlamaConfig, num_pages: int) -> tuple[int, ...]:
    """Return the shape of a pool of pages for a model, or for a share of one."""
    heads = (config.num_kv_heads, config.head_dim)
    return (num_pages, config.num_layers, 2, PAGE_TOKENS, *heads)


async def lead(loop: Loop, reference: PagedLlama, folder: Path) -> dict[str, Any]:
    """Run the first rank with its clients, and have another die at last."""
    ends: list[RankError | None] = []

    async def run() -> None:
        ends.append(await loop.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        checked = await show(loop, reference)
        if loop.num_ranks == 1:
            await loop.tell("stop")
            return checked
        answer = loop.generate(PROMPTS[1])
        await anext(answer)
        loop.orders.put_nowait("die")
        try:
            async for _ in answer:
                pass
        except RankError:
            checked["the client is told"] = True
    note(loop, ends[0], folder)
    notes = [await _note_of(folder, rank) for rank in range(loop.num_ranks - 1)]
    say(f"a rank died; each of the others, after so many seconds: {notes}")
    checked["a rank dies"] = all(seconds < 2 * BARRIER_S for seconds in notes)
    return checked


async def follow(loop: Loop, folder: Path) -> None:
    """Run another rank than the first."""
    error = await loop.run()
    if error is not None:
        note(loop, error, folder)


def note(loop: Loop, error: RankError | None, folder: Path) -> None:
    """Leave word of how long this rank took to learn that another is dead."""
    seconds = time.monotonic() - loop.died_at if error else -1.0
    draft = folder / f"note-{loop.rank}.tmp"
    draft.write_text(str(round(seconds, 3)), encoding="utf-8")
    draft.rename(folder / f"note-{loop.rank}")


async def _note_of(folder: Path, rank: int) -> float:
    path = folder / f"note-{rank}"
    with anyio.move_on_after(3 * BARRIER_S):
        while not path.exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.01)
        return float(path.read_text(encoding="utf-8"))
    return float("inf")


# Ranks.


async def serve(folder: Path) -> bool:
    """Be one rank: the first is its clients too, and reports. Return if all is well."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    started, whole = time.monotonic(), tiny_llama(num_kv_heads=4)
    model = whole.shard(rank, num_ranks, _sum)
    kv = AttentionPool(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype="float32",
    )
    layout = KVLayout(model="tiny", page_tokens=PAGE_TOKENS, pools=(kv,))
    device = CpuDevice(layout, num_pages=NUM_PAGES)
    store = FaultyStore(FileStore(folder / f"rank-{rank}"))
    limits = Limits(barrier_s=BARRIER_S, breaker_failures=100)
    group = TorchGroup(timeout_s=BARRIER_S)
    async with KVCache(
        layout, device=device, store=store, group=group, limits=limits
    ) as cache:
        loop = Loop(cache, model, device, store)
        if rank:
            await follow(loop, folder)
            return True
        checked = await lead(loop, whole, folder)
    took_s = round(time.monotonic() - started, 2)
    print(json.dumps({"ranks": num_ranks, "checked": checked, "took_s": took_s}))
    return all(checked.values())


def _sum(partial: torch.Tensor) -> torch.Tensor:
    """Sum what each rank's share adds to the hidden state."""
    total = partial.contiguous()
    dist.all_reduce(total)
    return total


def say(text: str) -> None:
    """Tell what was seen."""
    print(text, flush=True)


def be_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Join the others and serve, in a process of its own."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=num_ranks
        )
    is_well = asyncio.run(serve(folder))
    sys.stdout.flush()
    # With a rank dead there is nobody to take leave of.
    os._exit(0 if is_well else 1)


def main() -> None:
    """Start the ranks, or be the one that torchrun has started."""
    parser = argparse.ArgumentParser(prog="python -m examples.tensor_parallel")
    parser.add_argument("--ranks", type=int, default=2, help="2 by default")
    arguments = parser.parse_args()
    if arguments.ranks not in {1, 2, 4}:
        parser.error(f"--ranks must be 1, 2 or 4, not {arguments.ranks}: of 4 heads")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run, rank = os.environ["TORCHELASTIC_RUN_ID"], int(os.environ["RANK"])
        folder = Path(tempfile.gettempdir()) / f"asyncache-{run}"
        folder.mkdir(exist_ok=True)
        be_rank(rank, int(os.environ["WORLD_SIZE"]), folder)
    with tempfile.TemporaryDirectory(prefix="asyncache-") as name:
        raise SystemExit(start(arguments.ranks, Path(name)))


def start(num_ranks: int, folder: Path) -> int:
    """Run the ranks in processes; return the first one's exit status."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=be_rank, args=(rank, num_ranks, folder))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120.0)
    finally:
        for process in ranks:
            process.kill()
    return ranks[0].exitcode or 0


if __name__ == "__main__":
    main()
