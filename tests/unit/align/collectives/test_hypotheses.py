"""Each fault of a reduce, made by hand, is explained by its own hypothesis, with the number that was put in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from align.collectives.hypotheses import Held, Tried, first_fit, hypotheses_of, matched
from align.sentences import text_of
from tests.unit.align.collectives.reduces import CHANNELS, ROWS, parts, reduced, total

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def fit(found: tuple[Tried, ...]) -> Tried:
    one = first_fit(found)
    assert one is not None, [(other.name, text_of(other.what)) for other in found]
    return one


@DTYPES
def test_a_right_sum_needs_no_hypothesis(dtype: torch.dtype) -> None:
    summands = parts(dtype=dtype)
    whole = total(summands)
    assert hypotheses_of(reduced(summands, dict.fromkeys(summands, whole))) == ()


@DTYPES
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_missing_reduce(dtype: torch.dtype, ranks: int) -> None:
    summands = parts(ranks, dtype=dtype)
    found = fit(hypotheses_of(reduced(summands, dict(summands))))
    assert (found.name, found.ranks) == ("missing_reduce", tuple(range(ranks)))
    assert set(found.numbers["equal_elements"].values()) == {1.0}


@DTYPES
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_doubled_reduce_has_the_group_size_for_a_ratio(dtype: torch.dtype, ranks: int) -> None:
    summands = parts(ranks, dtype=dtype)
    whole = total(summands)
    twice = total(dict.fromkeys(summands, whole))
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, twice))))
    assert found.name == "doubled_reduce" and found.numbers["ratio"] == pytest.approx(ranks, rel=0.01)
    assert found.residual is not None and found.residual < 0.02


def test_a_sum_that_is_too_large_by_another_factor_is_not_doubled() -> None:
    summands = parts(3)
    found = hypotheses_of(reduced(summands, dict.fromkeys(summands, total(summands) * 2)))
    told = {one.name: one for one in found}
    assert told["doubled_reduce"].state == "refuted"
    assert told["doubled_reduce"].numbers["ratio"] == pytest.approx(2, rel=0.01)
    assert fit(found).name == "collective"


def test_a_stale_buffer_of_one_rank_names_what_it_held() -> None:
    summands, before = parts(), total(parts(seed=8))
    whole = total(summands)
    earlier = {
        rank: [Held("layers.0.mlp.down (step 3)", total(parts(seed=9))), Held("here", before)] for rank in (0, 1)
    }
    found = fit(hypotheses_of(reduced(summands, {0: whole, 1: before}, earlier=earlier)))
    assert (found.name, found.ranks, found.numbers["holds"]) == ("stale_buffer", (1,), {"1": "here"})


def test_what_was_held_before_is_not_observable_without_a_record() -> None:
    summands = parts()
    found = hypotheses_of(reduced(summands, {0: total(summands), 1: total(parts(seed=8))}))
    assert {one.name: one.state for one in found}["stale_buffer"] == "not observable"
    assert first_fit(found) is None, "nothing that was tried explains it"
    assert all(text_of(one.what, language) for one in found for language in ("en", "zh"))


@pytest.mark.parametrize("view", ["transposed", "transposed back", "heads first", "heads last"])
def test_a_wrong_view_of_the_sum(view: str) -> None:
    summands = parts()
    whole = total(summands)
    wrong = {
        "transposed": whole.t().contiguous().view(ROWS, CHANNELS),
        "transposed back": whole.reshape(CHANNELS, ROWS).t().contiguous(),
        "heads first": whole.view(ROWS, 4, 4).transpose(0, 1).reshape(ROWS, CHANNELS),
        "heads last": whole.reshape(4, ROWS, 4).transpose(0, 1).reshape(ROWS, CHANNELS),
    }[view]
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, wrong), heads=4)))
    assert (found.name, found.numbers) == ("permuted_rows", {"view": view})


def test_rows_of_the_sum_in_another_order_are_counted_and_named() -> None:
    summands = parts()
    order = torch.tensor([0, 2, 1, 3, 4, 6, 5])
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, total(summands)[order]))))
    assert (found.name, found.numbers["moved"], found.numbers["first"]) == ("permuted_rows", 4, [1, 2])
    assert "r0 position 1 has that of r0 position 2" in text_of(found.what)


def test_one_rank_with_another_order_of_the_batch_is_named() -> None:
    summands = parts(3)
    moved = {**summands, 1: summands[1].roll(1, 0)}
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, total(moved)))))
    assert (found.name, found.ranks, found.numbers["moved"]) == ("batch_order", (1,), ROWS)


def test_one_row_has_no_order() -> None:
    summands = parts(rows=1)
    found = hypotheses_of(reduced(summands, dict.fromkeys(summands, total(summands) * 3)))
    states = {one.name: one.state for one in found}
    assert states["permuted_rows"] == states["batch_order"] == "not observable"


@DTYPES
def test_a_rank_that_enters_with_a_factor_is_named(dtype: torch.dtype) -> None:
    summands = parts(3, dtype=dtype)
    scaled = {**summands, 2: (summands[2] * 1.25)}
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, total(scaled)))))
    assert (found.name, found.ranks) == ("collective", (2,))
    assert found.numbers["factors"]["0"] == pytest.approx([1, 1, 1.25], abs=0.02)


def test_a_rank_that_is_left_out_is_named() -> None:
    summands = parts(3)
    found = fit(hypotheses_of(reduced(summands, dict.fromkeys(summands, total({0: summands[0], 2: summands[2]})))))
    assert (found.name, found.ranks, found.numbers["left_out"]) == ("collective", (1,), [1])


def test_parts_that_are_not_finite_explain_nothing() -> None:
    summands = parts()
    summands[0][3, 3] = torch.inf
    (found,) = hypotheses_of(reduced(summands, dict.fromkeys(summands, total(summands) * 2)))
    assert found.state == "not observable"


def test_results_that_differ_by_a_rounding_are_wrong_on_the_later_rank() -> None:
    summands = parts()
    other = total(summands).clone()
    other.view(torch.int16)[3, 3] ^= 1
    found = hypotheses_of(reduced(summands, {0: total(summands), 1: other}))
    assert found and first_fit(found) is None


def test_equal_rows_stay_in_their_place() -> None:
    rows = torch.ones(4, 3)
    order = matched(rows.clone(), rows)
    assert order is not None and order.tolist() == [0, 1, 2, 3]
    assert matched(torch.zeros(4, 3), torch.arange(12.0).view(4, 3)) is None, "all nearest to one row"


def test_a_hypothesis_is_json() -> None:
    summands = parts()
    found = fit(hypotheses_of(reduced(summands, dict(summands))))
    plain = replace(found).to_dict()
    assert plain["name"] == "missing_reduce" and plain["state"] == "fits" and plain["ranks"] == [0, 1]
    assert plain["what"] == "ranks 0, 1 hold their own part alone, bit by bit: the reduce is missing"
