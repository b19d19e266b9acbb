"""The walk with runs that are made up: what is run, what is told on the way, and what stays after an interruption."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from align.ladder.executor import walk
from align.ladder.planner import ladder_to
from align.ladder.types import Headline, Ladder, Ran, SelfRan, Step, Verdict
from align.layout import Layout

BROKEN = Headline("C", "collective", "candidate", "layers.1.mlp.down", "it is wrong")


def ran(layout: Layout, verdict: Verdict) -> Ran:
    return Ran(layout, verdict, BROKEN if verdict == "diverged" else None, directory=layout.name, seconds=1.0)


@dataclass
class Made:
    verdicts: dict[Layout, Verdict]
    own: Verdict = "diverged"
    stops_at: Layout | None = None
    asked: list[object] = field(default_factory=list)

    def run(self, step: Step) -> Ran:
        if step.layout == self.stops_at:
            raise KeyboardInterrupt
        self.asked.append(step.layout)
        return ran(step.layout, self.verdicts.get(step.layout, "aligned"))

    def run_self(self, side: str, layout: Layout, against: Layout) -> SelfRan:
        self.asked.append((side, layout, against))
        return SelfRan(side, "lmdeploy", ran(layout, self.own), against)


def walked(made: Made, target: Layout, own: bool = True) -> tuple[Ladder, list[Ladder]]:
    told: list[Ladder] = []
    known = {target: ran(target, made.verdicts.get(target, "aligned"))}
    return walk(target, ladder_to(target), known, made, told.append, own=own), told


def test_a_fault_of_tp_is_walked_from_one_rank_and_the_engine_is_compared_with_itself() -> None:
    target = Layout(2, 2)
    made = Made({Layout(2): "diverged", target: "diverged"})
    found, told = walked(made, target)
    assert made.asked == [Layout(), Layout(2), ("candidate", Layout(2), Layout())]
    assert found.conclusion is not None and found.conclusion.dimension == "tp"
    assert [one.layout for one in found.ran] == [Layout(), Layout(2), target]
    assert [one.ran.verdict for one in found.own] == ["diverged"]
    assert told[-1] == found and all(one.conclusion is None for one in told[:-1])
    assert [len(one.ran) for one in told] == [1, 2, 3, 3, 3]


def test_what_comes_after_the_first_divergence_is_not_run() -> None:
    target = Layout(4, 2)
    made = Made({Layout(): "diverged", target: "diverged"})
    found, _ = walked(made, target)
    assert made.asked == [Layout()]
    assert found.planned == (Layout(), Layout(4), target)


def test_no_second_run_if_it_is_not_wanted() -> None:
    made = Made({Layout(2): "diverged"})
    found, _ = walked(made, Layout(2), own=False)
    assert made.asked == [Layout()] and found.own == ()


def test_an_inserted_rung_says_so() -> None:
    target = Layout(2, 2)
    made, told = Made({target: "diverged"}), list[Ladder]()
    found = walk(target, (Layout(), target), {target: ran(target, "diverged")}, made, told.append)
    assert [(one.layout, one.cause) for one in found.ran] == [
        (Layout(), "listed"),
        (Layout(2), "inserted"),
        (target, "listed"),
    ]
    assert found.planned == (Layout(), Layout(2), target)
    assert found.conclusion is not None and found.conclusion.dimension == "dp"


def test_an_interruption_keeps_what_was_told() -> None:
    told: list[Ladder] = []
    target = Layout(2, 2)
    made = Made({}, stops_at=Layout(2))
    with pytest.raises(KeyboardInterrupt):
        walk(target, ladder_to(target), {target: ran(target, "aligned")}, made, told.append)
    assert [one.layout for one in told[-1].ran] == [Layout(), target]
    assert told[-1].conclusion is None
