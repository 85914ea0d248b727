"""How requests come and go: from a handler's scope to a request of every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from asyncache.core import ClosedError, KVLayout, Namespace, OrderError, root_hash
from asyncache.engine._base_request import BaseRequest
from asyncache.engine._prompt import Prompt, make_prompt
from asyncache.engine._ranked import RankedRuntime
from asyncache.engine._runtime import Runtime
from asyncache.engine._tokens import TokenSource

R = TypeVar("R", bound=BaseRequest[Any])


class BaseScopes(ABC, Generic[R]):
    """The scopes of a cache: with one rank open when entered, else when admitted."""

    _runtime: Runtime[R] | None = None
    _layout: KVLayout
    _is_closed = False

    @abstractmethod
    def _new_request(
        self,
        runtime: Runtime[R],
        prompt: Prompt,
    ) -> R:
        """Return a request of this face's kind."""

    # Requests.

    def request(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        reserve_tokens: int = 0,
        priority: int = 0,
    ) -> R:
        """Return the scope of a new request, to be used in a ``with`` block.

        Args:
            tokens: The prompt, ids in [0, 2**31), shape [num_tokens], at least one: a
                sequence of ints, a buffer of integers, or a CPU tensor.
            namespace: What must not share pages with others, such as a tenant or an
                adapter. None, "" and b"" are three namespaces.
            reserve_tokens: Tokens beyond the prompt whose pages are reserved with it.
            priority: What the ``priority`` policy keeps its pages by.

        Raises:
            TypeError: If the tokens or the namespace are of another kind.
            ValueError: If an id or ``reserve_tokens`` is out of range.
            ClosedError: If the cache is closed.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        prompt = self._prompt_of(tokens, namespace, reserve_tokens, priority)
        return self._new_request(runtime, prompt)

    def abort(self, request: R) -> None:
        """Abort a request, as the loop decided; with several ranks, on each of them.

        Raises:
            ClosedError, AbortedError: If it has ended.
            ValueError: If it is of another cache.
        """
        runtime = self._open_runtime()
        self._check_ours([request])
        state = request._open_state()  # noqa: SLF001 - ours
        runtime.call(runtime.replica.calls.abort, state)

    # Several ranks: scopes are the handlers', calls the loop's.

    def prompt(
        self,
        tokens: TokenSource,
        *,
        namespace: Namespace = None,
        reserve_tokens: int = 0,
        priority: int = 0,
    ) -> Prompt:
        """Return what :meth:`admit` opens where every rank holds a scope of its own.

        The arguments and errors are those of :meth:`request`.
        """
        self._open_runtime().check_usable()
        return self._prompt_of(tokens, namespace, reserve_tokens, priority)

    def _prefetch_of(self, tokens: TokenSource, namespace: Namespace) -> Prompt:
        self._open_runtime().check_usable()
        return replace(self._prompt_of(tokens, namespace, 0, 0), is_prefetch=True)

    def _prompt_of(
        self, tokens: TokenSource, namespace: Namespace, reserve: int, priority: int
    ) -> Prompt:
        prompt = make_prompt(tokens, namespace, reserve, priority)
        # Raises what opening a request in it would raise.
        root_hash(self._layout, namespace)
        return prompt

    def waiting(self) -> list[Prompt]:
        """Return what handlers on this rank wait to have admitted, oldest first.

        A loop sends them to all ranks, with its batch, and all admit them in one order.
        They stay until they are admitted, or their handlers leave. With one rank
        nothing waits.
        """
        runtime = self._open_runtime()
        runtime.check_usable()
        if not isinstance(runtime, RankedRuntime):
            return []
        return [request._prompt for request in runtime.lobby.requests()]  # noqa: SLF001 - ours

    def admit(self, prompts: Iterable[Prompt]) -> list[R]:
        """Open requests on every rank: the same ones in the same order.

        Args:
            prompts: What :meth:`waiting` returned, on whatever rank, or :meth:`prompt`.

        Returns:
            A request a prompt: the handler's own on the rank that has its scope. One
            that could not be opened has ended, and says why: see ``is_open``.

        Raises:
            OrderError: If there is one rank, where scopes are open when entered, or as
                for any call.
            TypeError: If something is no prompt; nothing was opened.
            ValueError: If something is a prompt of other caches, or was tampered with;
                nothing was opened.
        """
        ranked = self._ranked()
        ranked.barrier.check_gap()
        prompts = list(prompts)
        for prompt in prompts:
            ranked.lobby.check(prompt)
            root_hash(self._layout, prompt.namespace)
        return [self._admit(ranked, prompt) for prompt in prompts]

    def _admit(self, ranked: RankedRuntime[R], prompt: Prompt) -> R:
        waits = ranked.lobby.take(prompt)
        request = waits or self._new_request(ranked, prompt)
        ranked.admit(request, prompt)
        if waits is None and prompt.scope and ranked.lobby.is_ours(prompt):
            # Its handler left in the meantime, and the others have opened it.
            request._finish(aborted=True)  # noqa: SLF001 - ours
        return request

    def left(self) -> Mapping[int, bool]:
        """Return whose scopes have ended on this rank, of requests that are open.

        With ``aborts="call"``, where the loop sends this to all ranks, and all
        :meth:`dismiss` them in one order. They stay until they are dismissed.

        Returns:
            For each request's id whether it was aborted.
        """
        return self._ranked().lobby.left()

    def dismiss(self, left: Mapping[int, bool]) -> None:
        """End requests on every rank: what :meth:`left` returned, on whatever rank.

        Those that have ended by now are left alone.

        Raises:
            OrderError: As for any call.
            TypeError, ValueError: If it is no such thing; nothing was ended.
        """
        self._ranked().dismiss(left)

    def _ranked(self) -> RankedRuntime[R]:
        runtime = self._open_runtime()
        runtime.check_usable()
        if not isinstance(runtime, RankedRuntime):
            raise OrderError("a cache without a group of ranks has no such call")
        return runtime

    def _check_ours(self, requests: Sequence[object]) -> None:
        for request in requests:
            if not isinstance(request, BaseRequest):
                kind = type(request).__name__
                raise TypeError(f"not a request, but {kind}: {request!r}")
            if request._runtime is not self._runtime:  # noqa: SLF001 - ours
                raise ValueError(f"{request!r} is of another cache")

    def _open_runtime(self) -> Runtime[R]:
        if self._runtime is None or self._is_closed:
            raise ClosedError("the cache is closed" if self._is_closed else "not open")
        return self._runtime
