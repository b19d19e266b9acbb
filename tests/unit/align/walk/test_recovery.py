"""The verdict on a transplant, against a chain of operators whose faults are known."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

from align.compare.policy import TensorPolicy
from align.sentences import text_of
from align.walk.recovery import (
    Floor,
    Local,
    Reading,
    TransplantResult,
    floor_of,
    judge,
    not_possible,
    outcome_at,
    read_point,
)
from align.walk.transplant import Accusation, Plan

PLAN = Plan("candidate", "layers.1.mlp.up", ("layers.1.mlp_norm",), "layers.1.mlp.up", ("logits", "layers.2.block_in"))
FLOOR = Floor(0.05, 0.1)
DIFFERENT = Local(False, 0.02)


def reading(none: float, inputs: float, output: float, name: str = "logits", **more: float) -> Reading:
    return Reading(name, 8, none, inputs, output, (none, inputs, output), FLOOR, 0.01, **more)


def verdict(*readings: Reading, known: bool | None = True, local: Local | None = DIFFERENT) -> TransplantResult:
    return judge(Accusation("candidate", "layers.1.mlp.up", known), PLAN, readings, local)


# --------------------------------------------------------------------------------------------------------- one point


@pytest.mark.parametrize(
    ("errors", "known", "outcome"),
    [
        ((0.5, 0.5, 0.02), None, "confirmed"),  # from beyond to clean
        ((0.5, 0.5, 0.09), None, "confirmed"),  # to less than a fifth
        ((0.5, 0.5, 0.11), None, "elsewhere"),
        ((0.5, 0.02, 0.02), True, "upstream"),
        ((0.5, 0.5, 0.5), True, "elsewhere"),
        ((0.011, 0.011, 0.0), None, "confirmed"),  # nothing is left of it
        ((0.011, 0.004, 0.0), False, "not measurable"),  # an operator that only rounds
        ((0.011, 0.011, 0.001), True, "confirmed"),
        ((0.011, 0.011, 0.001), None, "not measurable"),  # as small as rounding
        ((0.011, 0.011, 0.009), True, "not measurable"),
        ((0.0, 0.0, 0.0), True, "not measurable"),
        ((0.011, 0.001, 0.001), True, "not measurable"),  # inputs take their own rounding along
        ((inf, inf, 0.01), None, "confirmed"),
        ((inf, inf, inf), True, "elsewhere"),
        ((inf, 0.01, 0.01), True, "upstream"),
    ],
)
def test_one_point(errors: tuple[float, float, float], known: bool | None, outcome: str) -> None:
    assert outcome_at(reading(*errors), PLAN, known) == outcome


@pytest.mark.parametrize(
    ("share", "deviation", "known", "outcome"),
    [
        (1.02, 0.03, True, "confirmed"),
        (1.02, 0.03, None, "not measurable"),
        (1.02, 0.18, True, "not measurable"),
        (0.84, 0.106, True, "confirmed"),
        (0.6, 0.01, True, "not measurable"),  # rounded anew
        (0.3, 0.05, True, "not measurable"),
    ],
)
def test_the_repair_share(share: float, deviation: float, known: bool | None, outcome: str) -> None:
    point = reading(0.04, 0.04, 0.039, share=share, deviation=deviation)
    assert outcome_at(point, PLAN, known) == outcome
    behind_another_fault = replace(point, none=0.5, inputs=0.5, output=0.49)
    assert outcome_at(behind_another_fault, PLAN, known) == "elsewhere"


def test_the_output_itself_is_no_point_where_nothing_may_be_left() -> None:
    plan = replace(PLAN, checkpoint="logits", output="logits", points=("logits",))
    assert outcome_at(reading(0.011, 0.011, 0.0), plan, None) == "not measurable"


# ----------------------------------------------------------------------------------------------------------- verdict


def test_the_logits_decide() -> None:
    found = verdict(reading(0.5, 0.5, 0.0), reading(0.4, 0.4, 0.4, "layers.2.block_in"))
    assert (found.verdict, found.where) == ("confirmed", "logits")
    assert "0.5, with its inputs 0.5, with its output 0 " in found.why


def test_below_the_floor_of_the_logits_the_next_block_decides() -> None:
    found = verdict(reading(0.01, 0.01, 0.009), reading(0.3, 0.3, 0.01, "layers.2.block_in"))
    assert (found.verdict, found.where) == ("confirmed", "layers.2.block_in")
    assert "at the logits it is not told from rounding" in found.why


def test_more_is_wrong_behind_it() -> None:
    found = verdict(reading(0.5, 0.5, 0.45), reading(0.3, 0.3, 0.01, "layers.2.block_in"))
    assert (found.verdict, found.where) == ("confirmed", "layers.2.block_in")
    assert "more is wrong behind it" in found.why


def test_wrong_accusations_are_refused() -> None:
    upstream = verdict(reading(0.5, 0.01, 0.01))
    assert (upstream.verdict, upstream.where) == ("refuted", "upstream")
    elsewhere = verdict(reading(0.5, 0.5, 0.5))
    assert (elsewhere.verdict, elsewhere.where) == ("refuted", "elsewhere")
    small = reading(0.011, 0.011, 0.011)
    same = verdict(small, known=None, local=Local(True, 0.0))
    assert (same.verdict, same.where) == ("refuted", "elsewhere")
    assert "bit by bit" in same.why
    before = verdict(reading(0.011, 0.0, 0.0), known=None, local=Local(True, 0.0))
    assert (before.verdict, before.where) == ("refuted", "upstream")
    rounds = verdict(small, known=False)
    assert rounds.verdict == "refuted"
    assert "adds no more than rounding to its own inputs: whatever is wrong is elsewhere" in rounds.why


def test_the_other_side_is_named_where_the_accused_one_only_rounds() -> None:
    found = verdict(reading(0.011, 0.011, 0.0), known=False)
    assert (found.verdict, found.where) == ("refuted", "elsewhere")
    assert "look at the other side" in found.why


def test_what_is_not_told_from_rounding() -> None:
    for known in (True, None):
        found = verdict(reading(0.01, 0.01, 0.009), reading(0.02, 0.02, 0.018, "layers.2.block_in"), known=known)
        assert found.verdict == "not measurable"
    assert verdict(local=None, known=None).verdict == "not measurable", "nothing was read"


def test_a_result_is_json() -> None:
    found = verdict(reading(inf, inf, 0.01))
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["readings"][0]["none"] == "inf"
    assert plain["summary"] == found.summary
    refused = not_possible(Accusation("reference", "embed"), "because")
    assert refused.to_dict()["verdict"] == "not possible"
    assert refused.summary == "transplant of embed into the reference: not possible: because"


def test_the_floor_is_the_policys() -> None:
    policy = TensorPolicy.derived("bfloat16", 4)
    floor = floor_of(policy)
    assert floor("logits").allowed == policy.allowance("logits").whole
    assert floor("logits").clean == pytest.approx(floor("logits").allowed / 2)
    assert floor("layers.1.block_in").clean < floor("final_in").clean


# ---------------------------------------------------------------------------------------------------------- readings


def test_a_point_is_read_over_all_rows() -> None:
    other = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    none, inputs = other + torch.tensor([[1.0, 0.0], [0.0, 2.0]]), other + torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = read_point("logits", FLOOR, other, none, inputs, other.clone())
    assert (found.rows, found.output, found.share, found.deviation) == (2, 0.0, 1.0, 0.0)
    assert found.none == pytest.approx((5 / 50) ** 0.5)
    assert found.inputs == found.effect == pytest.approx((2 / 50) ** 0.5)
    assert found.worst == pytest.approx((0.4, 0.2, 0.0))


def test_nothing_moved_has_no_share() -> None:
    other = torch.ones(2, 3)
    found = read_point("logits", FLOOR, other, other * 2, other * 2, other * 2)
    assert (found.none, found.effect, found.share, found.deviation) == (1.0, 0.0, None, None)


def test_numbers_that_are_not_finite_are_infinite_errors() -> None:
    other = torch.ones(2, 3)
    broken = other.clone()
    broken[1, 2] = torch.nan
    found = read_point("logits", FLOOR, other, broken, broken, other)
    assert (found.none, found.inputs, found.output, found.share) == (inf, inf, 0.0, None)
    assert outcome_at(found, PLAN, None) == "confirmed"


def test_a_fault_under_other_rounding_is_found_by_its_share() -> None:
    """A fault of a third of the noise: the errors hardly move, the share is 1 within its deviation."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return torch.randn(200, 64, generator=generator, dtype=torch.float64) * scale

    other, fault = noise(1), noise(0.01)
    carried = other + noise(0.03)
    none, inputs, output = carried + fault, carried + fault, carried
    found = read_point("logits", FLOOR, other, none, inputs, output)
    assert found.share is not None
    assert found.deviation is not None
    assert abs(found.share - 1) < 3 * found.deviation < 0.3
    assert found.output > 0.8 * found.inputs
    assert verdict(found).verdict == "confirmed"
    assert "hides how far the error falls" in verdict(found).why
    # The same replays, while something else is wrong: what the output changes is then no repair.
    elsewhere = read_point("logits", FLOOR, other, none, other + noise(0.03), other + noise(0.03))
    assert verdict(elsewhere, known=None).verdict == "not measurable"


def test_the_reason_is_kept_as_data_and_read_in_chinese() -> None:
    found = verdict(reading(0.5, 0.5, 0.0), reading(0.4, 0.4, 0.4, "layers.2.block_in"))
    assert text_of(found.sentence) == found.why
    chinese = text_of(found.to_dict()["sentence"], "zh")
    assert chinese.startswith("换上另一侧的输入不能修复，换上其输出则能修复：logits 相对另一侧的误差：未替换 0.5")
    broken = verdict(reading(inf, 0.5, 0.5)).to_dict()
    assert "inf" in text_of(broken["sentence"], "zh")
    assert text_of(not_possible(Accusation("candidate", "x"), "no such thing").sentence, "zh") == "原文：no such thing"
