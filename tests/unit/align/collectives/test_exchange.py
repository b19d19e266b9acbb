"""Dispatch and combine of experts, against what brute force over every token and choice says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from align.collectives.record.types import CollectiveCall
from align.collectives.relations import Judged, Key, judge_call
from align.sentences import text_of
from tests.unit.align.collectives.calls import call

Tensor = torch.Tensor
EXPERTS, CHOSEN, HIDDEN, RANKS = 8, 2, 16, 2
LOCAL = EXPERTS // RANKS
TOKENS = (5, 4)


def ids_of(rank: int) -> Tensor:
    made = torch.Generator().manual_seed(7 + rank)
    return torch.stack([torch.randperm(EXPERTS, generator=made)[:CHOSEN] for _ in range(5)]).to(torch.int32)


def rows_of(rank: int) -> Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()


def scales_of(rank: int) -> Tensor:
    return torch.rand(5, CHOSEN, generator=torch.Generator().manual_seed(40 + rank))


def mask_of(rank: int) -> Tensor:
    return torch.arange(5) < TOKENS[rank]


def arriving(rank: int) -> list[tuple[int, int, int, int]]:
    """(expert, source, token, choice) in the order of the documentation."""
    return [
        (expert, source, token, choice)
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL)
        for source in range(RANKS)
        for token in range(TOKENS[source])
        for choice in range(CHOSEN)
        if int(ids_of(source)[token, choice]) == expert
    ]


def expert(number: int, row: Tensor) -> Tensor:
    return (row.float() * (number + 1) + number).bfloat16()


def dispatched(rank: int, **about: Any) -> CollectiveCall:
    where = arriving(rank)
    rows = torch.stack([rows_of(source)[token] for _, source, token, _ in where])
    numbers = [sum(1 for one in where if one[0] == rank * LOCAL + local) for local in range(LOCAL)]
    counts = [
        sum(1 for one in where[: len(where)] if one[:2] == (e, s))
        for e in range(rank * LOCAL, (rank + 1) * LOCAL)
        for s in range(RANKS)
    ]
    known = {"moe_expert_num": EXPERTS, "expert_token_nums_type": 1, "masked": True, "tokens": TOKENS[rank]}
    return call(
        rank, "dispatch", (rows_of(rank), ids_of(rank), mask_of(rank)),
        (rows, torch.tensor(numbers), torch.tensor(counts).cumsum(0).int()), about={**known, **about},
    )  # fmt: skip


def combined(rank: int, scales: Callable[[Tensor], Tensor] = lambda one: one) -> CollectiveCall:
    given = torch.stack([expert(number, rows_of(source)[token]) for number, source, token, _ in arriving(rank)])
    out = torch.zeros(5, HIDDEN)
    for token in range(TOKENS[rank]):
        for choice in range(CHOSEN):
            made = expert(int(ids_of(rank)[token, choice]), rows_of(rank)[token]).float()
            out[token] += scales(scales_of(rank))[token, choice] * made
    return call(
        rank, "combine", (given, ids_of(rank), scales_of(rank), mask_of(rank)), (out.bfloat16(),),
        about={"moe_expert_num": EXPERTS, "masked": True},
    )  # fmt: skip


def judged(*calls: CollectiveCall) -> Judged:
    return judge_call(Key((0, 1), "tp", 0), {one.rank: one for one in calls})


def said_of(found: Judged) -> str:
    assert found.what is not None
    return text_of(found.what)


def test_tokens_that_reach_their_experts_are_right() -> None:
    found = judged(dispatched(0), dispatched(1))
    assert (found.verdict, found.ranks) == ("right", ())


def changed(one: CollectiveCall, name: str, change: Callable[[Tensor], Tensor], **about: Any) -> CollectiveCall:
    tensors = {**one.tensors, name: change(one.tensors[name])}
    return CollectiveCall(**{**vars(one), "tensors": tensors, "about": {**one.about, **about}})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("out.0", lambda one: one.roll(1, 0), "in another order"),
        ("out.0", lambda one: one * 2, "are not those that were sent"),
        ("out.0", lambda one: one[:-1], "row"),
        ("out.1", lambda one: one.roll(1, 0), "counts"),
        ("out.2", lambda one: one + 1, "counts"),
    ],
)
def test_rows_and_counts_that_are_wrong_on_one_rank(name: str, change: Callable[[Tensor], Tensor], words: str) -> None:
    found = judged(dispatched(0), changed(dispatched(1), name, change))
    assert (found.verdict, found.ranks) == ("wrong", (1,))
    assert words in said_of(found)


def test_ids_of_a_rank_taken_for_global_ones() -> None:
    """Experts of rank 1 by their local numbers: its rows went to rank 0's experts."""
    wrong = changed(dispatched(0), "in.1", lambda one: one % LOCAL)
    found = judged(wrong, dispatched(1))
    assert found.verdict == "wrong" and found.ranks == (0, 1)


def test_a_pad_that_the_mask_lets_through() -> None:
    """Rank 1 has four tokens, and all of its five rows take part."""
    mine = changed(dispatched(1), "in.2", torch.ones_like)
    found = judged(dispatched(0), mine)
    assert found.verdict == "wrong" and 1 in found.ranks
    assert "mask of active rows" in said_of(
        judged(changed(dispatched(0), "in.2", lambda one: one, tokens=3), dispatched(1))
    )


def test_cumulative_numbers_of_tokens() -> None:
    ones = [changed(dispatched(rank, expert_token_nums_type=0), "out.1", lambda one: one.cumsum(0)) for rank in (0, 1)]
    assert judged(*ones).verdict == "right"


def test_results_that_come_home_weighted_once_are_right() -> None:
    found = judged(combined(0), combined(1))
    assert (found.verdict, found.ranks) == ("right", ())
    assert 0 < found.ratio <= 2 * CHOSEN


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (lambda one: one.square(), "twice"),
        (torch.ones_like, "without their weights"),
        (lambda one: one.roll(1, 1), "by each other's weights"),
        (lambda one: one * 2, "2 times that"),
    ],
)
def test_results_that_are_weighted_otherwise(scales: Callable[[Tensor], Tensor], words: str) -> None:
    found = judged(combined(0), combined(1, scales))
    assert (found.verdict, found.ranks) == ("wrong", (1,))
    assert words in said_of(found)


def test_a_row_that_did_not_come_home() -> None:
    found = judged(combined(0), changed(combined(1), "in.0", lambda one: one[:-1]))
    assert (found.verdict, found.ranks) == ("wrong", (1,))


def test_numbers_of_experts_that_do_not_fit_are_not_observable() -> None:
    assert judged(dispatched(0), dispatched(1, moe_expert_num=9)).verdict == "not observable"


def exchanged(rank: int, rows: Tensor, sent: tuple[int, ...], got: Tensor, received: tuple[int, ...]) -> CollectiveCall:
    return call(rank, "all_to_all", (rows,), (got,), sent=sent, received=received)


def test_parts_of_different_lengths() -> None:
    rows = [torch.arange(5.0)[:, None], torch.arange(10.0, 13.0)[:, None]]
    first = exchanged(0, rows[0], (2, 3), torch.cat([rows[0][:2], rows[1][:1]]), (2, 1))
    second = exchanged(1, rows[1], (1, 2), torch.cat([rows[0][2:], rows[1][1:]]), (3, 2))
    assert judged(first, second).verdict == "right"
    swapped = exchanged(1, rows[1], (1, 2), torch.cat([rows[1][1:], rows[0][2:]]), (3, 2))
    found = judged(first, swapped)
    assert (found.verdict, found.ranks) == ("wrong", (1,))
    counted = exchanged(1, rows[1], (1, 2), torch.cat([rows[0][2:], rows[1][1:]]), (2, 3))
    found = judged(first, counted)
    assert (found.verdict, found.ranks) == ("wrong", (1,)) and "expects 2 rows" in said_of(found)
