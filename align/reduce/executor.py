"""Tries smaller cases until none of them shows the finding any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from align.findings import Finding
from align.reduce.planner import Limits, proposals
from align.reduce.types import Ended, Fault, Proposal, Reduction, State, Tried


class Tries(Protocol):
    """Runs cases. What cannot be compared is an answer, too, and raises nothing."""

    def run(self, proposal: Proposal) -> tuple[Ended, str]:
        """What came of a case, and its directory."""


def reduce(
    start: State,
    finding: Finding,
    limits: Limits,
    tries: Tries,
    told: Callable[[State, Tried], None],
    most: int,
) -> tuple[State, Reduction]:
    """Walk to a case of which nothing can be left out, or until ``most`` cases were tried.

    Args:
        finding: as ``start`` shows it.
        told: hears of each try, with the smallest case so far.

    Raises:
        KeyboardInterrupt, SystemExit: passed on; what was told last stays true.
    """
    state, seen, done = start, {_key(start)}, list[Tried]()
    fault = Fault.of(finding)
    pending = proposals(state, finding, limits)
    complete = False
    while len(done) < most:
        proposal = next(_new(pending, seen), None)
        if proposal is None:
            complete = True
            break
        seen.add(_key(proposal.state))
        started = time.monotonic()
        ended, directory = tries.run(proposal)
        kept = ended.finding is not None and Fault.of(ended.finding) == fault
        tried = Tried(
            proposal.what,
            proposal.how,
            proposal.state.size,
            kept,
            "" if kept else _instead(ended),
            time.monotonic() - started,
            directory,
        )
        done.append(tried)
        if kept:
            assert ended.finding is not None
            state = proposal.state
            pending = proposals(state, ended.finding, limits)
        told(state, tried)
    shown = any(one.kept for one in done)
    return state, Reduction(fault, start.size, state.size, tuple(done), complete, shown)


def _new(pending: Iterator[Proposal], seen: set[str]) -> Iterator[Proposal]:
    return (one for one in pending if _key(one.state) not in seen)


def _key(state: State) -> str:
    return f"{state.layers} {state.case.to_text()}"


def _instead(ended: Ended) -> str:
    """What a case showed that is not what it should."""
    if ended.finding is not None:
        return str(Fault.of(ended.finding))
    return ended.why or ended.verdict
