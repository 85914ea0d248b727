"""What a step brought about, for loops that ask once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from asyncache.core import Fact, FactKind

if TYPE_CHECKING:
    from asyncache.engine._base_request import BaseRequest

R = TypeVar("R", bound="BaseRequest[Any]")


@dataclass(frozen=True, slots=True)
class StepReport(Generic[R]):
    """What happened between two steps.

    Args:
        landed: Open requests whose hit has settled.
        shortened: Open requests whose hit sank: what was computed above
            ``hit.num_tokens`` counts for nothing, and must be computed again.
        stored_pages: Positions that are now in the store.
        refused_pages: Positions whose offload failed or was given up.
    """

    landed: tuple[R, ...] = ()
    shortened: tuple[R, ...] = ()
    stored_pages: int = 0
    refused_pages: int = 0


class Reports(Generic[R]):
    """Collects what happens until a step takes it; bounded by the open requests.

    It holds no request: one that its owner lost must be missed.
    """

    def __init__(self) -> None:
        self._landed: WeakKeyDictionary[R, None] = WeakKeyDictionary()
        self._shortened: WeakKeyDictionary[R, None] = WeakKeyDictionary()
        self._stored_pages = 0
        self._refused_pages = 0
        self.is_empty = True

    def landed(self, request: R) -> None:
        """Note that a request's hit has settled."""
        self._landed[request] = None
        self.is_empty = False

    def shortened(self, request: R) -> None:
        """Note that a request's hit sank."""
        self._shortened[request] = None
        self.is_empty = False

    def ended(self, request: R) -> None:
        """Forget a request."""
        self._landed.pop(request, None)
        self._shortened.pop(request, None)

    def count(self, fact: Fact) -> None:
        """Count what became of pages."""
        if fact.kind is FactKind.STORED:
            self._stored_pages += fact.num_pages
            self.is_empty = False
        elif fact.kind is FactKind.OFFLOAD_FAILED:
            self._refused_pages += fact.num_pages
            self.is_empty = False

    def take(self) -> StepReport[R]:
        """Return what was collected, and begin anew."""
        if self.is_empty:
            return StepReport()
        report = StepReport(
            tuple(self._landed),
            tuple(self._shortened),
            self._stored_pages,
            self._refused_pages,
        )
        self.__init__()  # type: ignore[misc]  # begin anew
        return report
