"""Holds arrivals, so that the batch of each step is the one the case demands.

lmdeploy admits requests asynchronously: without a gate the first of four may be prefilled before the others are known.
The gate stands before scheduling. Before step *n* it submits every request whose arrival is at most *n* and waits
until the scheduler knows them all.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any

_POLL_SECONDS = 0.001


class Gate:
    """``submit(key)`` starts a request; ``known(key)`` says whether the scheduler holds it already."""

    def __init__(self) -> None:
        #: Wait until all due requests are known; off, the engine admits them as it pleases.
        self.hold = True
        #: Where groups step together: the common forward for which this group's workers wait for requests.
        self.due: Callable[[], int] | None = None
        self._step = 0
        self._due: list[str] = []
        self._waiting: list[tuple[int, str]] = []
        self._submit: Callable[[str], None] | None = None
        self._known: Callable[[str], bool] | None = None

    def arm(
        self, arrivals: Iterable[tuple[int, str]], submit: Callable[[str], None], known: Callable[[str], bool]
    ) -> None:
        """Begin a run. The first group is submitted at once, because an idle engine asks for nothing.

        Where groups step together nothing is, before this group's workers say that the run has begun.
        """
        self._step, self._due = 0, []
        self._waiting = sorted(arrivals)
        self._submit, self._known = submit, known
        if self.due is None:
            self.release_next()
        else:
            self._step = -1

    def _release(self, step: int) -> list[str]:
        due = [key for arrival, key in self._waiting if arrival <= step]
        self._waiting = [entry for entry in self._waiting if entry[0] > step]
        assert self._submit is not None
        for key in due:
            self._submit(key)
        return due

    def release_next(self) -> None:
        """The engine ran dry before a later arrival was due: it arrives now."""
        if self._waiting:
            # Later arrivals keep their distance to this one, as they do in an engine that is stepped from outside.
            self._step = max(self._step, self._waiting[0][0])
            self._due = self._release(self._step)

    async def next_arrival(self) -> None:
        """The engine ran dry: release the next arrival, as soon as the other groups have come as far."""
        if self.due is None:
            self.release_next()
            return
        assert self._waiting, "a run that is not over has a request that waits"
        while self.due() < self._waiting[0][0]:
            await asyncio.sleep(_POLL_SECONDS)
        self._step = max(self._step, self.due())
        self._due = self._release(self._step)

    async def _admit(self) -> None:
        if self._submit is None or self._known is None:
            return
        pending = [*self._due, *self._release(self._step)]
        self._due = []
        while self.hold and not all(self._known(key) for key in pending):
            await asyncio.sleep(_POLL_SECONDS)

    def wrap(self, original: Any) -> Any:
        """A coroutine function of the inputs maker that schedules one step."""

        @functools.wraps(original)
        async def gated(*args: Any, **kwargs: Any) -> Any:
            await self._admit()
            forward_inputs, running = await original(*args, **kwargs)
            if forward_inputs is not None:
                self._step += 1
            return forward_inputs, running

        return gated
