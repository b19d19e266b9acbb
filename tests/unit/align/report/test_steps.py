"""How many steps a case takes, and how long the rest of them."""

from __future__ import annotations

from typing import Any

import pytest

from align.case.schema import Batch, Case, CaseRequest, Decoding
from align.report.steps import Pace, expected_steps


def case(*requests: dict[str, Any], tokens: int = 16, **batch: Any) -> Case:
    made = tuple(CaseRequest(name=f"r{index}", token_ids=(1, 2), **one) for index, one in enumerate(requests))
    return Case(model="m", decoding=Decoding(max_new_tokens=tokens), batch=Batch(**batch), requests=made)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (case({}), 16),
        (case({}, {}, {}, {}), 16),
        (case({}, {"max_new_tokens": 20}), 20),
        (case({}, {"arrival": 3}), 19),
        (case({}, {"arrival": 100}), 32),  # nothing to do before it is due, so it comes at once
        (case({}, {}, {}, max_batch=1, together=False, tokens=4), 12),
        (case({}, {}, {}, max_batch=2, together=False, tokens=4), 8),
        (case({"max_new_tokens": 1}, {}, {}, max_batch=2, together=False, tokens=4), 5),
        (case({}, tokens=1), 1),
    ],
)
def test_steps_of_a_case(given: Case, steps: int) -> None:
    assert expected_steps(given) == steps


def test_there_is_no_time_left_without_a_basis() -> None:
    pace = Pace(17)
    for number, now in ((0, 0.0), (1, 10.0)):
        pace.hear(f"step {number}", now)
        assert pace.seconds_left(now) is None, "one step has no rate"
    pace.hear("step 1", 11.0)
    assert pace.seconds_left(11.0) is None
    assert (pace.done, pace.total) == (1, 17)


def test_the_rate_is_that_of_the_steps_behind_the_first() -> None:
    pace = Pace(17)
    pace.hear("step 1", 100.0)  # prefill took all the time until then
    pace.hear("step 5", 102.0)
    assert pace.seconds_left(102.0) == pytest.approx(12 * 0.5)
    assert pace.seconds_left(103.0) == pytest.approx(5.0)
    assert pace.seconds_left(109.0) is None, "it should have ended by now"


def test_a_stage_that_counts_anew_has_a_new_basis() -> None:
    pace = Pace(expected=16)
    for step, now in ((1, 0.0), (5, 4.0), (1, 6.0)):
        pace.hear(f"step {step}", now)
    assert pace.seconds_left(6.0) is None
    pace.hear("step 3", 7.0)
    assert pace.seconds_left(7.0) == pytest.approx(6.5)


def test_what_says_its_total_needs_none_expected() -> None:
    pace = Pace()
    pace.hear("1/84 embed", 0.0)
    pace.hear("21/84 layers.0.mlp.up", 10.0)
    assert (pace.done, pace.total) == (21, 84)
    assert pace.seconds_left(10.0) == pytest.approx(63 / 2)


def test_without_a_total_there_is_no_time_left() -> None:
    pace = Pace()
    for number in (1, 2, 3):
        pace.hear(f"step {number}", float(number))
    assert (pace.done, pace.total, pace.seconds_left(3.0)) == (3, None, None)


def test_more_steps_than_expected_and_words_that_name_none() -> None:
    pace = Pace(2)
    for number in (1, 2, 3):
        pace.hear(f"step {number}", float(number))
    assert (pace.done, pace.total, pace.seconds_left(3.0)) == (3, None, None)
    pace = Pace(20)
    pace.hear("step 1", 0.0)
    pace.hear("step 2", 1.0)
    for words in ("4 requests", "qwen3 in bfloat16, tp 1", "step by step", "/a/1/2/3"):
        pace.hear(words, 2.0)
        assert (pace.done, pace.seconds_left(2.0)) == (2, None), words
