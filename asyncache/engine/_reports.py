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
    """What happened between two steps; with a group, the same on every rank.

    Args:
        agreed: Open requests whose restore has its answer: ``hit.num_tokens`` says how
            much is resident or on its way.
        landed: Open requests whose hit has settled.
        shortened: Open requests whose hit sank: what was computed above
            ``hit.num_tokens`` counts for nothing, and must be computed again.
        aborted: Requests that ended otherwise than their loop wished: take them out of
            the batch.
        closed: Requests whose scopes have ended well.
        stored_pages: Positions that are now in the store.
        refused_pages: Positions whose offload failed or was given up.
    """

    agreed: tuple[R, ...] = ()
    landed: tuple[R, ...] = ()
    shortened: tuple[R, ...] = ()
    aborted: tuple[R, ...] = ()
    closed: tuple[R, ...] = ()
    stored_pages: int = 0
    refused_pages: int = 0


class Reports(Generic[R]):
    """Collects what happens until a step takes it.

    It holds no request: one that its owner lost must be missed, and where nobody steps
    nothing piles up.
    """

    def __init__(self) -> None:
        self._lists: dict[str, WeakKeyDictionary[R, None]] = {
            name: WeakKeyDictionary() for name in _LISTS
        }
        self._stored_pages = 0
        self._refused_pages = 0
        self.is_empty = True

    def note(self, name: str, request: R) -> None:
        """Put a request on one of the lists of :class:`StepReport`."""
        self._lists[name][request] = None
        self.is_empty = False

    def ended(self, request: R, *, aborted: bool) -> None:
        """Note that a request has ended, and nothing else of it."""
        for requests in self._lists.values():
            requests.pop(request, None)
        self.note("aborted" if aborted else "closed", request)

    def forget(self, request: R) -> None:
        """Take a request off all lists: it is no loop's."""
        for requests in self._lists.values():
            requests.pop(request, None)

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
            **{name: tuple(requests) for name, requests in self._lists.items()},
            stored_pages=self._stored_pages,
            refused_pages=self._refused_pages,
        )
        self.__init__()  # type: ignore[misc]  # begin anew
        return report


_LISTS = ("agreed", "landed", "shortened", "aborted", "closed")
