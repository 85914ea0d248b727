"""What a step brought about, for loops that ask once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from asyncache.core import Fact, FactKind

if TYPE_CHECKING:
    from asyncache.engine._request import Request


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened between two steps.

    Args:
        landed: Open requests whose hit has settled.
        shortened: Open requests whose hit sank: what was computed above
            ``hit.num_tokens`` counts for nothing, and must be computed again.
        stored_pages: Positions that are now in the store.
        refused_pages: Positions whose offload failed or was given up.
    """

    landed: tuple[Request, ...] = ()
    shortened: tuple[Request, ...] = ()
    stored_pages: int = 0
    refused_pages: int = 0


NOTHING = StepReport()


class Reports:
    """Collects what happens until a step takes it; bounded by the open requests.

    It holds no request: one that its owner lost must be missed.
    """

    def __init__(self) -> None:
        self._landed: WeakKeyDictionary[Request, None] = WeakKeyDictionary()
        self._shortened: WeakKeyDictionary[Request, None] = WeakKeyDictionary()
        self._stored_pages = 0
        self._refused_pages = 0
        self._is_empty = True

    def landed(self, request: Request) -> None:
        """Note that a request's hit has settled."""
        self._landed[request] = None
        self._is_empty = False

    def shortened(self, request: Request) -> None:
        """Note that a request's hit sank."""
        self._shortened[request] = None
        self._is_empty = False

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._landed.pop(request, None)
        self._shortened.pop(request, None)

    def count(self, fact: Fact) -> None:
        """Count what became of pages."""
        if fact.kind is FactKind.STORED:
            self._stored_pages += fact.num_pages
            self._is_empty = False
        elif fact.kind is FactKind.OFFLOAD_FAILED:
            self._refused_pages += fact.num_pages
            self._is_empty = False

    def take(self) -> StepReport:
        """Return what was collected, and begin anew."""
        if self._is_empty:
            return NOTHING
        report = StepReport(
            tuple(self._landed),
            tuple(self._shortened),
            self._stored_pages,
            self._refused_pages,
        )
        self.__init__()  # type: ignore[misc]  # begin anew
        return report
