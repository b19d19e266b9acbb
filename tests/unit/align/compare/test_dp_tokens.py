"""Tokens of equal requests on different data-parallel ranks."""

from __future__ import annotations

from adapters.base import Generation, TokenStep
from align.case.schema import CaseRequest
from align.compare.dp_tokens import Parted, parted, twins
from align.compare.noise import NoisePolicy

POLICY = NoisePolicy.for_dtype("bfloat16")


def request(name: str, rank: int, *ids: int) -> CaseRequest:
    return CaseRequest(name=name, token_ids=ids, dp_rank=rank)


def generated(name: str, *ids: int, gap: float = 2.0, other: int = 99) -> Generation:
    """Ids that are preferred to ``other`` by ``gap`` at the last step, by far before."""
    steps = [TokenStep(one, one, ((one, -0.25), (other, -0.25 - (gap if at == len(ids) - 1 else 3.0))), 7.0)
             for at, one in enumerate(ids)]  # fmt: skip
    return Generation(name, tuple(steps))


def found(*sides: Generation) -> list[Parted]:
    requests = [request("a", 0, 1, 2), request("b", 1, 1, 2), request("c", 1, 7), request("d", 0, 1, 2)]
    return parted(requests, {one.request: one for one in sides}, POLICY)


def test_equal_prompts_on_other_ranks_are_twins() -> None:
    requests = [request("a", 0, 1, 2), request("b", 1, 1, 2), request("c", 1, 7), request("d", 0, 1, 2)]
    assert [(one.name, other.name) for one, other in twins(requests)] == [("a", "b")]
    assert twins([request("a", 0, 1), request("b", 1, 2)]) == []


def test_the_first_step_at_which_they_part() -> None:
    (one,) = found(generated("a", 5, 6, 7), generated("b", 5, 8, 9))
    assert one == Parted(("a", "b"), (0, 1), 1, (6, 8), False)


def test_a_near_tie_is_said() -> None:
    (one,) = found(generated("a", 5, 6, gap=0.001, other=8), generated("b", 5, 8, gap=0.001, other=6))
    assert (one.step, one.near_tie) == (1, True)


def test_equal_tokens_do_not_part() -> None:
    assert found(generated("a", 5, 6), generated("b", 5, 6)) == []
    assert found(generated("a", 5, 6, 7), generated("b", 5, 6)) == [], "one was asked for more"
    assert found(generated("a", 5, 6)) == [], "of the other one nothing is known"
