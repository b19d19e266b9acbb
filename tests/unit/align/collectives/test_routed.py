"""Wrong results of experts that ranks share, made by plain loops over tokens and choices, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from align.collectives.hypotheses import Tried, first_fit
from align.collectives.routed import Routed, is_right, routed_tried

Tensor = torch.Tensor
ROWS, HIDDEN, INNER, EXPERTS, CHOSEN, RANKS = 24, 64, 48, 8, 2, 2
EACH = EXPERTS // RANKS
_made = torch.Generator().manual_seed(3)
X = torch.randn(ROWS, HIDDEN, generator=_made).bfloat16()
SHAPES = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
WEIGHTS = [tuple(torch.randn(*shape, generator=_made).bfloat16() / 7 for shape in SHAPES) for _ in range(EXPERTS)]
IDS = torch.stack([torch.randperm(EXPERTS, generator=_made)[:CHOSEN] for _ in range(ROWS)])
SHARES = torch.rand(ROWS, CHOSEN, generator=_made) * 0.8 + 0.1


def expert(number: int, row: Tensor) -> Tensor:
    gate, up, down = (one.float() for one in WEIGHTS[number])
    wide = row.float()
    return down @ (torch.nn.functional.silu(gate @ wide) * (up @ wide))


def result(
    of: Callable[[int], int] = int,
    share: Callable[[float], float] = float,
    keep: Callable[[int], float] = lambda number: 1.0,
) -> Tensor:
    found = torch.zeros(ROWS, HIDDEN)
    for token in range(ROWS):
        for choice in range(CHOSEN):
            number = int(IDS[token, choice])
            weight = share(float(SHARES[token, choice])) * keep(number)
            found[token] += weight * expert(of(number), X[token])
    return found.bfloat16()


def given(value: Tensor, split: bool = False) -> Routed:
    by_expert = torch.zeros(ROWS, EXPERTS).scatter_(1, IDS, SHARES)
    matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]] = lambda number: WEIGHTS[number]  # type: ignore[assignment,return-value]  # noqa: E731
    return Routed(X, IDS, by_expert, value, EXPERTS, RANKS, split, matrices)


def fit(value: Tensor, split: bool = False) -> Tried | None:
    return first_fit(routed_tried(given(value, split)))


def test_what_was_chosen_is_right() -> None:
    assert is_right(given(result())) and routed_tried(given(result())) == ()


@pytest.mark.parametrize(
    ("of", "name", "ranks"),
    [
        (lambda one: one % EACH, "local", (1,)),
        (lambda one: (one + 1) % EXPERTS, "shift", (0, 1)),
        (lambda one: one // EACH * EACH + (one % EACH + 1) % EACH, "within", (0, 1)),
        (lambda one: one if one < EACH else EACH + (one % EACH + 1) % EACH, "within", (1,)),
        (lambda one: (one + EACH) % EXPERTS, "ranks", (0, 1)),
    ],
)
def test_experts_that_are_taken_for_others(of: Callable[[int], int], name: str, ranks: tuple[int, ...]) -> None:
    found = fit(result(of))
    assert found is not None and (found.name, found.state) == ("expert_map", "fits")
    assert {int(one): other for one, other in found.numbers["experts"].items()} == {
        one: of(one) for one in range(EXPERTS) if of(one) != one
    }
    if name != "local":  # rank 0's local numbers are its global ones
        assert (found.numbers["map"], found.ranks) == (name, ranks)


@pytest.mark.parametrize(("share", "name"), [(lambda one: one * one, "twice"), (lambda one: 1.0, "left_out")])
def test_weights_that_are_applied_otherwise(share: Callable[[float], float], name: str) -> None:
    found = fit(result(share=share))
    assert found is not None and found.name == "combine_weights" and found.numbers == {"weights": name}


def test_rows_that_came_home_in_another_order() -> None:
    found = fit(result().roll(1, 0))
    assert found is not None and (found.name, found.numbers["moved"]) == ("permuted_rows", ROWS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by", ["made", "given"])
def test_rows_of_one_rank_that_its_experts_mix_up(rank: int, by: str) -> None:
    """Sorted by expert, what a rank's experts get, or what they make of it, stands one row on."""
    found = torch.zeros(ROWS, HIDDEN)
    for other in range(RANKS):
        received = [
            (e, t, c) for e in range(EXPERTS) for t in range(ROWS) for c in range(CHOSEN) if int(IDS[t, c]) == e
        ]
        received = [one for one in received if one[0] // EACH == other]
        for place, (number, token, choice) in enumerate(received):
            source = received[place - 1] if other == rank else (number, token, choice)
            made = expert(source[0] if by == "made" else number, X[source[1]])
            found[token] += float(SHARES[token, choice]) * made
    one = fit(found.bfloat16())
    assert one is not None and (one.name, one.ranks) == ("permuted_rows", (rank,))
    assert one.numbers["like"] >= 0.8 and one.numbers["moved"] >= 0.8 * one.numbers["rows"]


def test_a_rank_whose_experts_are_missing() -> None:
    found = fit(result(keep=lambda number: float(number < EACH)))
    assert found is not None and (found.name, found.ranks) == ("collective", (1,))
    assert found.numbers["left_out"] == [1]


def test_a_sum_that_was_made_twice() -> None:
    for split in (False, True):
        found = fit(result(keep=lambda number: 2.0), split)
        assert found is not None and found.name == "doubled_reduce"
        assert found.numbers["ratio"] == pytest.approx(2, rel=0.01)


def test_what_nothing_explains_is_refuted() -> None:
    tried = routed_tried(given((result().float() + torch.randn(ROWS, HIDDEN)).bfloat16()))
    assert {one.state for one in tried} == {"refuted"}


def test_a_few_rows_do_not_tell_whether_experts_mixed_them_up() -> None:
    """So that a decode step does not take back what a prefill says."""
    one = given(torch.randn(ROWS, HIDDEN).bfloat16())
    few = Routed(X[:4], IDS[:4], one.weights[:4], one.result[:4], EXPERTS, RANKS, False, one.expert)
    states = {tried.name: tried.state for tried in routed_tried(few)}
    assert states["permuted_rows"] == "not observable"
