"""Walks a ladder: runs what the planner asks for, and tells after each rung how far it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from align.ladder.planner import accused_sides, next_move, ordered
from align.ladder.types import Ladder, Ran, SelfRan, Step
from align.layout import Layout
from align.sentences import Said


class Rungs(Protocol):
    """Runs the case at other layouts. What cannot be compared is an answer, too, and raises nothing."""

    def run(self, step: Step) -> Ran:
        """Both engines at one layout."""

    def run_self(self, side: str, layout: Layout, against: Layout) -> SelfRan:
        """One side's engine at a layout, against the same engine at a simpler one."""


def walk(
    target: Layout,
    planned: Sequence[Layout],
    known: Mapping[Layout, Ran],
    rungs: Rungs,
    told: Callable[[Ladder], None],
    notes: tuple[Said, ...] = (),
    own: bool = True,
) -> Ladder:
    """Walk to a conclusion.

    Args:
        known: what was run already, such as the target.
        told: hears the ladder after each step; the last one is complete.
        own: whether an accused engine is compared with itself where a dimension introduced the fault.

    Raises:
        KeyboardInterrupt, SystemExit: passed on; what was told last stays true.
    """
    ran = dict(known)
    ladder = Ladder(target, ordered(planned), _sorted(ran), notes=notes)
    told(ladder)
    while isinstance(move := next_move(planned, ran), Step):
        ran[move.layout] = replace(rungs.run(move), cause=move.cause)
        ladder = replace(ladder, planned=ordered((*planned, *ran)), ran=_sorted(ran))
        told(ladder)
    found: tuple[SelfRan, ...] = ()
    for side in accused_sides(move, ran) if own else ():
        assert move.introduced_at is not None and move.clean_at is not None
        found = (*found, rungs.run_self(side, move.introduced_at, move.clean_at))
        ladder = replace(ladder, own=found)
        told(ladder)
    ladder = replace(ladder, conclusion=move)
    told(ladder)
    return ladder


def _sorted(ran: Mapping[Layout, Ran]) -> tuple[Ran, ...]:
    return tuple(ran[one] for one in ordered(ran))
