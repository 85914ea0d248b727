"""Ranks that are processes, and a group here that passes its calls on to them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from array import array
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch.distributed as dist

from asyncache import core
from asyncache.ranks import Group, TorchGroup

# A fork of a process that has torch, and no threads: there at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", "tests.ranks.processes"])
GONE = (EOFError, ConnectionError)


def watch(connection, on_message):
    """Call ``on_message`` for each message; with None, and no more, once there is none.

    A message is small: once it has begun to come it is there.
    """
    loop = asyncio.get_running_loop()

    def read():
        try:
            on_message(connection.recv())
        except GONE:
            loop.remove_reader(connection.fileno())
            on_message(None)

    loop.add_reader(connection.fileno(), read)


class Rank:
    """What a process does with its group, as it is told."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.orders = asyncio.Queue()
        self.group: TorchGroup | None = None
        self.call: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        watch(self.connection, self.orders.put_nowait)
        while (order := await self.orders.get()) is not None:
            number, name, *arguments = order
            if name == "all_min":
                await self.begin(number, *arguments)
            else:
                await self.answer(number, getattr(self, name)(*arguments))

    async def begin(self, number, items):
        # Cancelled, it ends soon; else a second call is what is wanted.
        if self.call is not None and self.call.cancelling():
            await asyncio.wait([self.call])
        minimum = self.group.all_min(vector := array("i", items))
        self.call = asyncio.create_task(self.answer(number, minimum, vector))

    async def answer(self, number, work, result=None):
        try:
            returned = await work
            if result is None:
                result = returned
        except (core.AsyncacheError, ValueError) as error:
            result = error
        self.connection.send((number, result))

    async def make(self, ranks, timeout_s):
        self.group = TorchGroup(ranks, timeout_s=timeout_s)
        return self.group.rank, self.group.num_ranks

    async def cancel(self):
        self.call.cancel()

    async def turn(self):
        """Let a call that has begun hand over its part."""
        await asyncio.sleep(0)

    async def aclose(self):
        await self.group.aclose()

    async def destroy_all_groups(self):
        dist.destroy_process_group()


def be_rank(connection: Connection, rank: int, num_ranks: int, path: str) -> None:
    """Serve until the other end is closed, by its process's death too."""
    store = dist.FileStore(path, num_ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=20),
    )

    async def main():
        await Rank(connection).serve()

    asyncio.run(main())


class RemoteGroup(Group):
    """A group in another process; cancelled here, a call is cancelled there."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection
        self._answers: dict[int, asyncio.Future] = {}
        self._num_orders = 0
        watch(connection, self._hear)

    def _hear(self, message):
        if message is None:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the process is gone"))
            return
        number, result = message
        answer = self._answers.pop(number)
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def tell(self, name, *arguments):
        self._num_orders += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._num_orders] = answer
        self._connection.send((self._num_orders, name, *arguments))
        return answer

    async def make(self, ranks, timeout_s):
        self.rank, self.num_ranks = await self.tell("make", ranks, timeout_s)

    async def all_min(self, vector):
        try:
            minimum = await self.tell("all_min", list(vector))
        except asyncio.CancelledError:
            self.tell("cancel")
            raise
        vector[:] = minimum

    async def aclose(self):
        await self.tell("aclose")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Take the process down, whatever it does."""
        with suppress(ValueError):  # it is gone, and so is its reader
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@asynccontextmanager
async def processes(num_ranks, folder):
    """Start ranks that share a default process group, and have no group of ours yet."""
    started = []
    try:
        for rank in range(num_ranks):
            ours, theirs = FORKS.Pipe()
            with closing(theirs):
                process = FORKS.Process(
                    target=be_rank, args=(theirs, rank, num_ranks, f"{folder}/store")
                )
                process.start()
            started.append(RemoteGroup(process, ours))
        yield started
    finally:
        for group in started:
            group.end()


async def make_group(groups, *, timeout_s, ranks=None):
    """Make one group of some processes, all at once."""
    await asyncio.gather(*(group.make(ranks, timeout_s) for group in groups))
