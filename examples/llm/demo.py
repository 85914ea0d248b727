"""``python -m examples.llm.demo``: what a cache that outlives its process is worth.

Process A reads this repository's license and is asked two questions about it: the
first computes the text, the second finds it on the device. Process B starts with an
empty pool and A's store, and is asked the second question: it finds the text in files,
which the operating system still has in memory: no disk is timed. Then requests are
cancelled at bad moments, and the pages are counted.

The last line printed is JSON. The exit status is not zero if a token differed, a page
leaked, or process B had to compute the text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asyncache.stores import FileStore
from asyncache.testing import GateStore
from examples.llm.loop import Model
from examples.llm.measure import PAGE_TOKENS, Answer, TimedFileStore, serving
from examples.llm.model import Chunk, LlamaConfig
from examples.llm.weights import ChatTokenizer, load_smollm2

ROOT = Path(__file__).parents[2]
FIRST_QUESTION = "What is a Derivative Work?"
SECOND_QUESTION = "Is there a warranty?"


class Prompts:
    """Prompts about one document."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        text = (ROOT / "LICENSE").read_text(encoding="utf-8")
        terms, _, _ = text.partition("END OF TERMS AND CONDITIONS")
        document = tokenizer.encode(f"Read this license.\n\n{terms.strip()}")
        # The document ends where a page does, and each question fits the next page: so
        # whatever is cached by then, its own tokens are what a question has to compute.
        num_before = tokenizer.chat([-1]).index(-1)
        num_cut = (num_before + len(document)) % PAGE_TOKENS
        self._document = document[: len(document) - num_cut]
        self._tokenizer = tokenizer

    @property
    def warm_up(self) -> list[int]:
        """A prompt that shares nothing with the others."""
        return self._document[:600][::-1]

    def about(self, question: str) -> list[int]:
        """Return the prompt that asks a question about the document."""
        asked = f"\n\nQuestion: {question}\nAnswer in one sentence."
        return self._tokenizer.chat([*self._document, *self._tokenizer.encode(asked)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What the second process reports."""

    answer: Answer
    read_s: float
    leaked_pages: int


class WatchedModel:
    """A model that says when its forward has begun, in its thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.begun = anyio.Event()

    @property
    def config(self) -> LlamaConfig:
        """Shape of the model."""
        return self._model.config

    def forward(self, chunks: Sequence[Chunk], pool: torch.Tensor) -> torch.Tensor:
        """Say so, then compute."""
        anyio.from_thread.run_sync(self.begun.set)
        return self._model.forward(chunks, pool)


async def first_process(
    model: Model, tokenizer: ChatTokenizer, directory: Path
) -> tuple[Answer, Answer, int]:
    """Ask both questions; leave the document in the store; count leaked pages."""
    prompts = Prompts(tokenizer)
    async with serving(model, tokenizer, FileStore(directory)) as server:
        await server.warm_up(prompts.warm_up, namespace="A")
        cold = await server.ask(prompts.about(FIRST_QUESTION))
        await server.cache.drain(deadline_s=60.0)
        resident = await server.ask(prompts.about(SECOND_QUESTION))
        return cold, resident, await server.leaked_pages()


async def second_process(
    model: Model, tokenizer: ChatTokenizer, directory: Path
) -> Restart:
    """Ask the second question of an empty pool with a full store."""
    prompts, store = Prompts(tokenizer), TimedFileStore(directory)
    async with serving(model, tokenizer, store) as server:
        await server.warm_up(prompts.warm_up, namespace="B")
        answer = await server.ask(prompts.about(SECOND_QUESTION))
        leaked_pages = await server.leaked_pages()
        return Restart(answer=answer, read_s=store.read_s, leaked_pages=leaked_pages)


async def cancel_at_bad_moments(
    model: Model, tokenizer: ChatTokenizer, directory: Path, ledgers: Table
) -> tuple[Answer, int]:
    """Cancel a load and a forward in full flight; then ask what was asked before."""
    prompt = Prompts(tokenizer).about(SECOND_QUESTION)
    store = GateStore(FileStore(directory), is_open=True)
    watched = WatchedModel(model)
    async with serving(watched, tokenizer, store) as server:

        def show(when: str) -> None:
            ledgers.add_row(when, *map(str, astuple(server.ledger())))

        store.get_gate.close()
        async with anyio.create_task_group() as client:
            client.start_soon(server.ask, prompt)
            await store.get_gate.wait_arrived()
            show("while a load is in flight")
            client.cancel_scope.cancel()
        show("its client cancelled")
        store.get_gate.open()
        async with anyio.create_task_group() as client:
            client.start_soon(partial(server.ask, prompt, namespace="somebody else"))
            await watched.begun.wait()
            show("while a forward runs")
            client.cancel_scope.cancel()
        show("its client cancelled")
        answer = await server.ask(prompt)
        leaked_pages = await server.leaked_pages()
        show("after the next answer")
        return answer, leaked_pages


def restart(directory: Path) -> Restart:
    """Run the second process."""
    command = [sys.executable, "-m", "examples.llm.demo", "--restarted", str(directory)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    report = json.loads(done.stdout)
    return Restart(**report | {"answer": Answer(**report["answer"])})


def table_of(*headers: str, title: str) -> Table:
    """Return a table of numbers, one row a name."""
    table = Table("", title=title, box=SIMPLE)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def sources(cold: Answer, resident: Answer, restarted: Restart) -> Table:
    """Return where each prompt came from, for a person."""
    headers = ("first token", "computed", "device", "store", "loaded", "at")
    table = table_of(*headers, title="Where the tokens of a prompt came from")
    rate = restarted.answer.loaded_bytes / 1e6 / max(restarted.read_s, 1e-6)
    for name, answer, at in (
        ("cold", cold, ""),
        ("resident", resident, ""),
        ("restarted", restarted.answer, f"{rate:.0f} MB/s"),
    ):
        table.add_row(
            name,
            f"{answer.ttft_s * 1e3:.0f} ms",
            str(answer.num_computed),
            str(answer.num_from_device),
            str(answer.num_from_store),
            f"{answer.loaded_bytes / 1e6:.0f} MB",
            at,
        )
    return table


def run(model: Model, tokenizer: ChatTokenizer) -> int:
    """Run both processes and print what came of them; return the exit status."""
    states = ("free", "request", "tree", "transit", "quarantine")
    ledgers = table_of(*states, title="Where the pages are")
    with tempfile.TemporaryDirectory(prefix="asyncache-demo-") as name:
        directory = Path(name)
        cold, resident, leaked = anyio.run(first_process, model, tokenizer, directory)
        restarted = restart(directory)
        last, leaked_last = anyio.run(
            cancel_at_bad_moments, model, tokenizer, directory, ledgers
        )
    restored, console = restarted.answer, Console()
    for question, answer in ((FIRST_QUESTION, cold), (SECOND_QUESTION, restored)):
        console.print(f"[bold]{question}[/] {tokenizer.decode(answer.tokens)}")
    console.print(sources(cold, resident, restarted), ledgers)
    is_identical = resident.tokens == restored.tokens == last.tokens
    leaked_pages = leaked + restarted.leaked_pages + leaked_last
    summary = {
        "cold_ttft_s": round(cold.ttft_s, 4),
        "device_ttft_s": round(resident.ttft_s, 4),
        "restored_ttft_s": round(restored.ttft_s, 4),
        "restored_tokens": restored.num_from_store,
        "identical_tokens": is_identical,
        "leaked_pages": leaked_pages,
    }
    print(json.dumps(summary))
    is_whole = restored.num_from_store == resident.num_from_device > 0
    return 0 if is_identical and is_whole and not leaked_pages else 1


def main() -> int:
    """Run the demo, or the second process of it; return the exit status."""
    parser = argparse.ArgumentParser(prog="examples.llm.demo", description=__doc__)
    parser.add_argument("--restarted", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # One core computes, as an accelerator would; the other is for everything else.
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    if arguments.restarted is None:
        return run(model, tokenizer)
    report = anyio.run(second_process, model, tokenizer, arguments.restarted)
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
