"""A gloo process group: how its ranks meet, and the one collective that they run.

Gloo aborts the process where ranks bring tensors of unequal shape, and mixes up what
they bring in unequal order. So what is reduced is a frame whose width depends on
nothing but earlier rounds, and whose header shows whether all are in the same round.

Of this room only this module imports torch, and not before it is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from asyncache.core import OrderError, RankError

if TYPE_CHECKING:
    import torch.distributed as dist

# The minima of n and of -n show whether n is the same everywhere.
_HEADER_ITEMS = 4
_ROUND_NUMBERS = 2**31


def meet(ranks: Sequence[int] | None, timeout_s: float) -> dist.ProcessGroup:
    """Return a process group of our own over some ranks of the default group.

    Not ``new_group``: it numbers groups by the process, so that replicas that do not
    make the same ones meet by mistake, and one of a name that was used before does not
    come about. The store counts ours, and nobody but its owner keeps it open.
    """
    import torch.distributed as dist  # noqa: PLC0415 - as above

    if not (dist.is_available() and dist.is_initialized()):
        raise OrderError(
            "torch.distributed is not initialised: call init_process_group() first"
        )
    members = _checked(ranks, dist.get_rank(), dist.get_world_size())
    rank = members.index(dist.get_rank())
    c10d, limit = dist.distributed_c10d, timedelta(seconds=timeout_s)
    # torch has no other way to it.
    everybody = c10d._get_default_store()  # noqa: SLF001
    family = c10d.PrefixStore(f"asyncache/{members}", everybody)
    store = c10d.PrefixStore(str(family.add(f"made by {rank}", 1)), family)
    arrived = {member: f"here: {member}" for member in members}
    store.set(arrived[members[rank]], "")
    try:
        store.wait(list(arrived.values()), limit)
        made = dist.ProcessGroupGloo(store, rank, len(members), limit)
    except RuntimeError as error:
        missing = [m for m, sign in arrived.items() if not store.check([sign])]
        raise RankError(
            f"ranks {members} did not meet within {timeout_s} s, {missing} are missing"
        ) from error
    return cast("dist.ProcessGroup", made)  # the stubs leave its methods out


def _checked(ranks: Sequence[int] | None, own: int, num_ranks: int) -> list[int]:
    members = sorted(range(num_ranks) if ranks is None else ranks)
    if len(set(members)) < len(members):
        raise ValueError(f"ranks must differ, not {members}")
    if not set(members) <= set(range(num_ranks)):
        raise ValueError(f"ranks must be in [0, {num_ranks}), not {members}")
    if own not in members:
        raise ValueError(f"ranks must include this process's own, {own}, not {members}")
    return members


def check_own(process_group: dist.ProcessGroup) -> None:
    """Raise ValueError if it is the default process group, which all others rest on."""
    import torch.distributed as dist  # noqa: PLC0415 - as above

    if dist.is_initialized() and process_group is dist.group.WORLD:
        raise ValueError(
            "the default process group cannot be handed over: make another"
        )


class Collective:
    """Minima over the ranks of a process group, one after another.

    It is used by one thread. A round of as many items as the one before it is one
    reduce; a change of length costs one more.

    Args:
        process_group: Nobody else's; kept until :meth:`leave`.
        timeout_s: Seconds that a reduce waits for another rank.
    """

    def __init__(self, process_group: dist.ProcessGroup, timeout_s: float) -> None:
        import torch  # noqa: PLC0415 - as above
        import torch.distributed as dist  # noqa: PLC0415

        self._process_group: dist.ProcessGroup | None = process_group
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._options.timeout = timedelta(seconds=timeout_s)
        self._int32 = torch.int32
        self._from_buffer = torch.frombuffer
        self._num_rounds = 0
        self._set_width(0)

    def take_minimum(self, part: array[int]) -> None:
        """Replace each item of ``part``, int32, by its minimum over all ranks.

        Raises:
            RankError: If a rank is gone, silent, or in another round.
        """
        self._exchange(part)
        if len(part) != self._width:
            # Agreed by now: all ranks widen or narrow their frames in this round.
            self._set_width(len(part))
            self._exchange(part)
        self._num_rounds += 1
        memoryview(part)[:] = self._items

    def leave(self) -> None:
        """Close the connections to the other ranks, who take it for our death."""
        import torch.distributed as dist  # noqa: PLC0415 - as above

        process_group, self._process_group = self._process_group, None
        if isinstance(process_group, dist.ProcessGroup):
            # Its owner may have destroyed all groups before us.
            with suppress(ValueError, KeyError):
                dist.destroy_process_group(process_group)

    def _set_width(self, num_items: int) -> None:
        self._width = num_items
        frame = array("i", bytes(4 * (_HEADER_ITEMS + num_items)))
        self._tensors = [self._from_buffer(frame, dtype=self._int32)]
        self._header = memoryview(frame)[:_HEADER_ITEMS]
        self._items = memoryview(frame)[_HEADER_ITEMS:]

    def _exchange(self, part: array[int]) -> None:
        num_items, number = len(part), self._num_rounds % _ROUND_NUMBERS
        self._header[:] = array("i", (num_items, -num_items, number, -number))
        if num_items == self._width:
            self._items[:] = memoryview(part)
        self._all_reduce()
        fewest, most, first, last = self._header
        if fewest != -most:
            raise RankError(
                f"this rank sent {num_items} items, others {fewest} to {-most}"
            )
        if first != -last:
            raise RankError(
                f"ranks are in rounds {first} to {-last}, this one in {number}"
            )

    def _all_reduce(self) -> None:
        assert self._process_group is not None
        try:
            # Nothing may keep the work: it, too, keeps the connections open.
            self._process_group.allreduce(self._tensors, self._options).wait()
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]  # what follows is advice
            raise RankError(f"a rank is gone or silent: {reason}") from error
