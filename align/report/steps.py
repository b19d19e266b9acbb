"""How far a stage is: its steps, how many there will be, and how long the rest takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from align.case.schema import Case, CaseRequest

#: What the sides say of themselves: ``step 4``; and what the comparison says: ``12/84 layers.2.mlp_norm``.
_STEP = re.compile(r"step (\d+)")
_PART = re.compile(r"(\d+)/(\d+)\b")


def expected_steps(case: Case) -> int:
    """Engine steps of one generation, as far as the case tells: the longest of the data-parallel ranks.

    An engine may need some more (prefill in a step of its own, looking ahead) or fewer (an end token).
    """
    ranks: dict[int, list[CaseRequest]] = {}
    for request in case.requests:
        ranks.setdefault(request.dp_rank, []).append(request)
    tokens, width = case.decoding.max_new_tokens, case.batch.max_batch
    return max(_steps(requests, tokens, width) for requests in ranks.values())


def _steps(requests: Iterable[CaseRequest], tokens: int, width: int | None) -> int:
    """Every request that was admitted yields a token per step; others wait for their step and for a free place."""
    waiting = sorted((one.arrival, one.max_new_tokens or tokens) for one in requests)
    running: list[int] = []
    step = 0
    while waiting or running:
        # An engine with nothing to do takes the next ones at once.
        due = step if running else max(step, waiting[0][0])
        while waiting and waiting[0][0] <= due and (width is None or len(running) < width):
            running.append(waiting.pop(0)[1])
        step += 1
        running = [left - 1 for left in running if left > 1]
    return step


@dataclass
class Pace:
    """The steps of one side in one stage, as they are heard of.

    Attributes:
        expected: steps of the whole stage, unless the side itself says how many; ``None`` is not known.
        done: steps so far; ``None`` before any was heard of.
        total: steps of the stage; ``None`` while what was heard last names no step, or if there are more than expected.
    """

    expected: int | None = None
    done: int | None = None
    total: int | None = None
    _first: tuple[float, int] | None = field(default=None, repr=False)
    _last: tuple[float, int] | None = field(default=None, repr=False)

    def hear(self, detail: str, now: float) -> None:
        """A detail that may name a step, and when it was heard, in seconds."""
        part = _PART.match(detail)
        step = part or _STEP.fullmatch(detail)
        if step is None:
            self.total = None
            return
        self.done = int(step[1])
        self.total = int(part[2]) if part else self.expected
        if self.total is not None and self.done > self.total:  # expected wrongly
            self.total = None
        # The first step prefills, and what comes before it is no step: the rate is that of the steps behind it.
        if self.done and (self._last is None or self.done != self._last[1]):
            if self._last is not None and self.done < self._last[1]:
                self._first = None  # another pass of the same stage counts anew
            self._first = self._first or (now, self.done)
            self._last = (now, self.done)

    def seconds_left(self, now: float) -> float | None:
        """At the rate of this stage's steps; ``None`` without a basis, or when they should have ended by now."""
        if self.total is None or self._first is None or self._last is None or self._first == self._last:
            return None
        (began, first), (heard, last) = self._first, self._last
        if last <= first:
            return None
        left = (self.total - last) * (heard - began) / (last - first) - (now - heard)
        return left if left > 0 else None
