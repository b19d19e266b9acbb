"""Whose rows of routed experts are wrong, where the ranks of a group divide the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from adapters.base import RowSpan
from align.checkpoints.table import Structure, parse
from align.collectives import routed_sides
from align.collectives.hypotheses import first_fit
from align.collectives.routed_sides import wrong_side
from align.sentences import text_of
from align.trace.format import StepEntry
from tests.unit.align.collectives.test_routed import (
    CHOSEN,
    EACH,
    EXPERTS,
    HIDDEN,
    IDS,
    INNER,
    ROWS,
    SHARES,
    WEIGHTS,
    X,
    expert,
    result,
)

Tensor = torch.Tensor
HALF = ROWS // 2
NAME = parse("layers.0.moe.routed")
STRUCTURE = Structure(
    ("qwen3_moe", "moe"), 1, HIDDEN, 2, 2, HIDDEN // 2, INNER, 32, 1e-6, {}, 1.0,
    tp=2, ep=2, experts=EXPERTS, topk=CHOSEN,
)  # fmt: skip
RIGHT = result()
#: Ids of which rank 1's rows have rank 0's alone, as the few rows of a decode step often do.
ELSEWHERE = torch.where((torch.arange(ROWS) >= HALF)[:, None], (IDS[:, :1] + torch.arange(CHOSEN)) % EACH, IDS)
TWICE = result(share=lambda one: one * one)
LOCAL = result(of=lambda one: one % (EXPERTS // 2))


@dataclass
class Recording:
    """One prefill of all rows; rank 0 sends the first half of them to the experts, rank 1 the second."""

    held: dict[int, Tensor]
    divided: bool = True
    structure: Structure = STRUCTURE
    dtype: str = "bfloat16"
    ranks: tuple[int, ...] = (0, 1)
    ids: Tensor = IDS

    @property
    def manifest(self) -> dict[str, Any]:
        return {"layout": {"tp": 2, "dp": 1}, "model_info": {"path": "/nowhere"}}

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        parts = {"moe.topk_ids": [rank * HALF, HALF]} if self.divided else {}
        return (StepEntry(0, "prefill", (RowSpan("r0", 0, ROWS),), experts={"parts": parts, "whole": ["moe.routed"]}),)

    def joined(self, step: int, name: str) -> Tensor:
        weights = torch.zeros(ROWS, EXPERTS).scatter_(1, self.ids, SHARES)
        return {"mlp_norm": X, "topk_ids": self.ids, "topk_weights": weights}[name.rpartition(".")[2]]

    def tensor(self, rank: int, step: int, name: str) -> Tensor:
        return self.held[rank]


@dataclass
class Steps(Recording):
    """Two prefills, the second one that of another recording."""

    then: Recording = field(default_factory=lambda: Recording(both(RIGHT)))

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        return (*super().steps(rank), *(replace(one, step=1) for one in self.then.steps(rank)))

    def joined(self, step: int, name: str) -> Tensor:
        return self.then.joined(0, name) if step else super().joined(step, name)

    def tensor(self, rank: int, step: int, name: str) -> Tensor:
        return self.then.tensor(rank, 0, name) if step else super().tensor(rank, step, name)


class Files:
    def __init__(self, *_: object) -> None: ...

    def of_experts(self, part: str, layer: int, expert: int) -> tuple[str, int]:
        return part, expert

    def read(self, one: tuple[str, int]) -> Tensor:
        return WEIGHTS[one[1]][("gate", "up", "down").index(one[0])]

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_sides, "CheckpointWeights", Files)


def judged(recording: Recording) -> tuple[tuple[int, ...], str, tuple[int, ...]] | None:
    """Ranks whose rows are wrong, what explains it, and the ranks that this names."""
    found = wrong_side(NAME, {"candidate": recording})  # type: ignore[dict-item]
    if found is None:
        return None
    assert found[0] == "candidate"
    fits = [fit for tried in found[2] if (fit := first_fit(tried)) is not None]
    assert fits
    return found[1], fits[0].name, fits[0].ranks


def sentence(recording: Recording) -> str:
    """What is said of the first wrong rows."""
    found = wrong_side(NAME, {"candidate": recording})  # type: ignore[dict-item]
    assert found is not None
    fit = first_fit(found[2][0])
    assert fit is not None
    return text_of(fit.what)


def own_alone(ids: Tensor, *ranks: int) -> Tensor:
    """Rows that these ranks send have what their own experts made, all others what all did; by plain loops."""
    found = torch.zeros(ROWS, HIDDEN)
    for row in range(ROWS):
        sender = row // HALF
        for choice in range(CHOSEN):
            number = int(ids[row, choice])
            if sender not in ranks or number // EACH == sender:
                found[row] += float(SHARES[row, choice]) * expert(number, X[row])
    return found.bfloat16()


def lacking(ids: Tensor, rank: int) -> Tensor:
    """All rows without what one rank's experts make."""
    found = torch.zeros(ROWS, HIDDEN)
    for row, choice in ((row, choice) for row in range(ROWS) for choice in range(CHOSEN)):
        number = int(ids[row, choice])
        if number // EACH != rank:
            found[row] += float(SHARES[row, choice]) * expert(number, X[row])
    return found.bfloat16()


def both(value: Tensor) -> dict[int, Tensor]:
    return {0: value, 1: value}


def test_rows_of_all_ranks_that_are_right_are_no_fault() -> None:
    assert judged(Recording(both(RIGHT))) is None


@pytest.mark.parametrize(("wrong", "kind"), [(TWICE, "combine_weights"), (LOCAL, "expert_map")])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_whose_own_rows_are_wrong_is_named(wrong: Tensor, kind: str, rank: int) -> None:
    """Every rank holds all rows afterwards, so that the copies say nothing of who sent them."""
    own = (torch.arange(ROWS) // HALF == rank)[:, None]
    found = judged(Recording(both(torch.where(own, wrong, RIGHT))))
    assert found is not None and found[:2] == ((rank,), kind)


def test_a_fault_of_all_ranks_names_all_of_them() -> None:
    found = judged(Recording(both(TWICE)))
    assert found is not None and found[:2] == ((0, 1), "combine_weights")


def test_experts_that_are_missing_are_named_by_their_own_rank() -> None:
    absent = result(keep=lambda number: float(number < EXPERTS // 2))
    assert judged(Recording(both(absent))) == ((0, 1), "collective", (1,))


def test_ranks_that_get_back_what_their_own_experts_made_lack_a_reduce() -> None:
    """Each has its own part alone; what only one of two has is no part that is left out everywhere."""
    parts = [result(keep=lambda number, rank=rank: float(number // (EXPERTS // 2) == rank)) for rank in (0, 1)]  # type: ignore[misc]
    first = (torch.arange(ROWS) < HALF)[:, None]
    assert judged(Recording(both(torch.where(first, parts[0], parts[1])))) == ((0, 1), "missing_reduce", (0,))
    assert judged(Recording(both(torch.where(first, parts[0], RIGHT)))) == ((0,), "missing_reduce", (0,))


def test_rows_without_an_expert_of_their_own_rank_lack_a_reduce_too() -> None:
    """Nothing is known of a part that no row has: rows of rank 1 come back empty, and need no part of rank 1."""
    found = judged(Recording(both(own_alone(ELSEWHERE, 1)), ids=ELSEWHERE))
    assert found == ((1,), "missing_reduce", (1,))
    found = judged(Recording(both(own_alone(ELSEWHERE, 0, 1)), ids=ELSEWHERE))
    assert found == ((0, 1), "missing_reduce", (0,))


def test_what_is_said_of_a_missing_reduce_is_about_the_rows_that_lack_it() -> None:
    told = sentence(Recording(both(own_alone(IDS, 0, 1))))
    assert told.startswith("nothing that other ranks' experts made came back to the rows of rank 0: they have ")


def test_a_part_that_nobody_has_is_left_out_whichever_rows_show_it() -> None:
    """Where rank 0's rows alone need rank 1's part, that it is not there proves no reduce missing."""
    unshown = Recording(both(lacking(ELSEWHERE, 1)), ids=ELSEWHERE)
    assert judged(unshown) == ((0,), "collective", (1,))
    assert "cannot tell whether it is left out everywhere" in sentence(unshown)
    assert "cannot tell" not in sentence(Recording(both(lacking(IDS, 1))))
    assert judged(Recording(both(lacking(ELSEWHERE, 0)), ids=ELSEWHERE)) == ((0, 1), "collective", (0,))


@pytest.mark.parametrize(
    ("first", "later", "kind", "wrong"),
    [
        (own_alone(ELSEWHERE, 0), own_alone(IDS, 0), "missing_reduce", (0,)),
        (own_alone(ELSEWHERE, 0), own_alone(IDS, 0, 1), "missing_reduce", (0, 1)),
        (lacking(ELSEWHERE, 1), lacking(IDS, 1), "collective", (0, 1)),
    ],
)
def test_another_step_shows_whether_a_part_is_left_out_everywhere(
    first: Tensor, later: Tensor, kind: str, wrong: tuple[int, ...]
) -> None:
    """The first cannot: rank 0's rows lack rank 1's part, and rank 1's rows are right without it."""
    assert torch.equal(own_alone(ELSEWHERE, 0), lacking(ELSEWHERE, 1))
    found = judged(Steps(both(first), ids=ELSEWHERE, then=Recording(both(later))))
    assert found is not None and found[:2] == (wrong, kind)


def test_rows_that_the_ranks_exchanged_are_a_permutation_of_the_whole() -> None:
    found = judged(Recording(both(RIGHT.roll(HALF, 0))))
    assert found is not None and found[:2] == ((0, 1), "permuted_rows")


def test_ranks_that_do_not_divide_the_rows_each_hold_a_copy() -> None:
    found = judged(Recording({0: RIGHT, 1: TWICE}, divided=False))
    assert found is not None and found[:2] == ((1,), "combine_weights")
