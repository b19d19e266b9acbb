"""What is asked first: answered, derived or unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from align.case.schema import Batch
from align.result.facts import NO_ANSWERS, Answers, facts_of
from align.result.ground import Ground
from align.result.parts import Fact
from align.run.report import Report
from tests.unit.align.result.made import comparison
from tests.unit.align.run import recordings

RIGHT: dict[str, tuple[int, ...]] = {"r0": (1, 2), "r1": (3, 4)}
GROUND = Ground(
    "run", recordings.case(), recordings.info(), {"candidate": "lmdeploy", "reference": "vllm"}, "simnpu", True,
    {"reference": {"vllm": "0.1", "torch": "2"}},
)  # fmt: skip


def facts(
    candidate: dict[str, tuple[int, ...]] | None = None,
    answers: Answers = NO_ANSWERS,
    ground: Ground = GROUND,
    **more: Any,
) -> dict[str, Fact]:
    report = Report(**more)
    if candidate is not None:
        report.comparisons = {"free": comparison(candidate, RIGHT)}
    return {fact.name: fact for fact in facts_of(report, ground, answers)}


@pytest.mark.parametrize(
    ("candidate", "onset", "symptom"),
    [
        (RIGHT, "no token differs", "no difference"),
        ({"r0": (9, 2), "r1": (3, 4)}, "first token", "first token wrong"),
        ({"r0": (1, 2), "r1": (3, 9)}, "later token", "wrong after some tokens"),
        ({"r0": (1, 9), "r1": (9, 4)}, "first token", "first token wrong"),
    ],
)
def test_the_onset_is_derived(candidate: dict[str, tuple[int, ...]], onset: str, symptom: str) -> None:
    found = facts(candidate)
    assert (found["onset"].value, found["onset"].status) == (onset, "derived")
    assert (found["symptom"].value, found["symptom"].status) == (symptom, "derived")


def test_the_place_is_told() -> None:
    assert facts({"r0": (1, 2), "r1": (3, 9)})["onset"].about["request"] == "r1"
    assert facts({"r0": (1, 2), "r1": (3, 9)})["onset"].about["index"] == 1


def test_without_tokens_nothing_is_derived_of_them() -> None:
    found = facts()
    for name in ("onset", "symptom", "batching", "optimisation_stage", "execution_mode"):
        assert (found[name].status, found[name].value) == ("unknown", None), name


def test_an_answer_wins_and_what_was_seen_stays() -> None:
    answers = Answers(symptom="score fell by 2", onset="later", batching="multi", stage="graph", baseline="the GPU")
    found = facts({"r0": (9, 2), "r1": (3, 4)}, answers)
    assert (found["onset"].value, found["onset"].observed) == ("later token", "first token")
    assert (found["symptom"].value, found["symptom"].observed) == ("score fell by 2", "first token wrong")
    assert (found["batching"].value, found["batching"].observed) == ("only several requests show it", None)
    assert (found["optimisation_stage"].value, found["optimisation_stage"].observed) == ("graph", None)
    assert (found["baseline"].value, found["baseline"].observed) == ("the GPU", "vllm 0.1")
    names = ("onset", "symptom", "batching", "optimisation_stage", "baseline")
    assert {found[name].status for name in names} == {"answered"}


def test_whether_one_request_shows_it_is_known_only_if_one_ran_alone() -> None:
    wrong: dict[str, tuple[int, ...]] = {"r0": (9, 2), "r1": (3, 4)}
    assert facts(wrong)["batching"].status == "unknown"
    assert facts(wrong)["batching"].about["requests"] == 2
    alone = replace(GROUND, case=recordings.case(batch=Batch(max_batch=1, together=False)))
    assert facts(wrong, ground=alone)["batching"].value == "a single request shows it"
    assert facts(RIGHT)["batching"].value == "nothing to show"


def test_what_the_command_decides() -> None:
    found = facts(answers=Answers(model=True))
    assert (found["model"].status, found["layout"].status) == ("answered", "derived")
    assert found["layout"].value == "tp1 dp1 ep1"
    assert found["quantisation"].value == "none"
    quantised = replace(recordings.info(), config={"quantization_config": {"quant_method": "awq"}})
    assert facts(ground=replace(GROUND, info=quantised))["quantisation"].value == "awq"


def test_hardware_and_mode_are_read_back() -> None:
    soc = replace(recordings.condition(name="soc"), observed={"candidate": "A2", "reference": "A2"})
    eager = recordings.condition("false")
    found = facts(conditions=(soc, eager))
    assert found["hardware"].value == "simnpu, A2"
    assert found["execution_mode"].value == "candidate eager, reference graph"
    assert facts(conditions=(recordings.condition(),))["execution_mode"].value == "eager"
    unread = replace(eager, observed={"candidate": True, "reference": None})
    assert facts(conditions=(unread,))["execution_mode"].status == "unknown"


def test_of_nothing_all_is_unknown() -> None:
    assert {fact.status for fact in facts(ground=Ground("run")).values()} == {"unknown"}
