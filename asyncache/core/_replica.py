"""The replica: the one door to a cache's state, the same on every rank.

Only a *call* or a *verdict* changes it; both are folded into its digest. Equal calls
and verdicts in equal order leave equal replicas, whatever the ranks' clocks, stores
and clients do in between: those only move votes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from asyncache.core import _verdicts
from asyncache.core._calls import Calls
from asyncache.core._effects import Effect
from asyncache.core._layout import KVLayout
from asyncache.core._look import Look
from asyncache.core._policies import Policy, lru
from asyncache.core._state import Bounds, State
from asyncache.core._votes import Ballot, cast


class Replica:
    """One rank's copy of the deterministic state.

    Args:
        layout: The pools of the model.
        num_pages: Pages of each pool, by name, as agreed by all ranks.
        bounds: What may be open at once.
        policy: Which leaf is evicted first, as a sort key over nodes.
        tells_pages: Whether it tells of each page that comes or goes; it need not be
            the same on every rank.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: Mapping[str, int],
        bounds: Bounds,
        policy: Policy = lru,
        *,
        tells_pages: bool = False,
    ) -> None:
        self._state = State(layout, num_pages, bounds, policy)
        self._state.news.is_told = tells_pages
        self.calls = Calls(self._state)
        """What the loop tells it."""
        self.look = Look(self._state)
        """What can be seen of it."""

    def ballot(self) -> Ballot:
        """Return the slot table of the next step."""
        return cast(self._state)

    def apply(self, ballot: Ballot, verdict: array[int]) -> bool:
        """Apply what the ranks agreed on.

        Args:
            ballot: The ballot that the verdict answers.
            verdict: Minimum over ranks of ``Votes.fill(ballot)``, shape
                [ballot.num_ints], int32.

        Returns:
            Whether every rank goes on with what all of them are at; see
            ``Votes.going``.

        Raises:
            RankError: If the replicas differ; nothing was changed.
        """
        return _verdicts.apply(self._state, ballot, verdict)

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, in order; it is the caller's now."""
        effects, self._state.effects = self._state.effects, []
        return effects
