"""A drill's plan, its journal, and what it comes to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from align.case.capacity import capacity
from align.drill.benign import benign, benign_controls, patch_of
from align.drill.campaign import Journal, by_launch, check_same, control_settings, controls, setting_of, summary
from align.drill.document import cell, render
from align.drill.executor import told
from align.drill.library import read_faults
from align.drill.score import Rate
from align.drill.settings import ANY, Setting, batches, case_of, requests_of
from align.drill.trials import Trial, draw
from align.errors import UserError
from align.findings import Finding
from align.models.resolve import resolve_model
from align.run.report import Report
from tests.unit.align.run import recordings

FACTS = {"model": "qwen3", "candidate": "lmdeploy", "reference": "vllm", "seed": 3, "simulated": True, "quick": False}
FAULTS = {fault.name: fault for fault in read_faults()}


def record(name: str, number: int = 0, seconds: float = 2.0, **changed: Any) -> dict[str, Any]:
    """A journal's line: of a right answer, unless something is changed."""
    trial = draw(FAULTS[name], "candidate", "lmdeploy", 3, number)
    assert trial.expected is not None
    one = trial.expected
    given = {"path": one.path, "kind": one.kinds[0], "side": one.side, "checkpoint": one.checkpoint, **changed}
    findings = () if changed.get("path") == "none" else (Finding(**given),)
    report = Report(verdict="diverged" if findings else "aligned", findings=findings)
    line: dict[str, Any] = json.loads(json.dumps(told(trial, report, ("a", "b", "c"), "", seconds).to_dict()))
    return line


def control(alarm: bool = False) -> dict[str, Any]:
    trial = Trial("", int(alarm), "none", "", {}, None, "plain")
    report = Report(verdict="aligned")
    if alarm:
        report = Report(verdict="diverged", findings=(Finding("B", "operator", "candidate", "layers.0.mlp.down"),))
    return told(trial, report, ("a",), "", 1.0).to_dict()


def test_controls_differ_on_their_sides_and_are_swapped() -> None:
    settings = control_settings(["qwen3"], 7, 200)
    assert len(settings) == 200 and settings == control_settings(["qwen3"], 7, 200)
    assert {one.numerics for one in settings} == {("native", "fp32-internal"), ("fp32-internal", "native")}
    assert {one.batch for one in settings} == set(batches()) and {one.dtype for one in settings} == {
        "bfloat16", "float16",
    }  # fmt: skip
    trials = controls(settings)
    assert len({trial.id for _, trial in trials}) == 200 and all(trial.expected is None for _, trial in trials)


def test_controls_of_several_models_take_turns_and_some_have_two_ranks() -> None:
    settings = control_settings(["qwen3", "qwen3-moe", "smollm2"], 7, 208)
    assert Counter(one.model for one in settings) == {"qwen3": 104, "qwen3-moe": 52, "smollm2": 52}
    spread = [one for one in settings if one.tp == 2]
    assert len(spread) == 16 and {one.model for one in spread} == {"qwen3", "qwen3-moe", "smollm2"}
    assert all(one.live for one in settings)
    seen = {(one.model, one.batch, one.dtype, one.numerics) for one in settings if one.tp == 1}
    assert len(seen) == 3 * len(batches()) * 4, "each that there is"


def test_a_model_that_no_two_ranks_can_share_has_one_rank() -> None:
    """SmolLM2 has 9 heads."""
    models = ["qwen3", "smollm2"]
    settings = control_settings(models, 7, 104, lambda model: model == "qwen3")
    assert {one.model for one in settings if one.tp == 2} == {"qwen3"}
    assert sum(one.tp == 2 for one in settings) == 104 // 13
    usual = control_settings(models, 7, 104)
    assert [one for one in settings if one.tp == 1] == [one for one in usual if one.tp == 1]
    assert all(one.tp == 1 for one in control_settings(["smollm2"], 7, 104, lambda model: False))


def test_controls_in_which_the_sides_differ_have_launches_of_their_own() -> None:
    work = benign_controls(["qwen3", "smollm2", "qwen3_moe"])
    assert {one.source for one in benign().values()} == {"N1", "N2", "N3", "N5", "N7", "N8"}
    assert len({trial.id for _, trial in work}) == len(work) == 12
    assert all(trial.expected is None and not trial.fault for _, trial in work)
    for setting, trial in work:
        patch = patch_of(trial.benign)
        assert (patch is None) == (trial.side == "none")
        assert patch is None or (patch.is_file() and trial.side in ("candidate", "reference"))
        assert setting in by_launch(work), "its own batch"
        if trial.benign == "near_tie":
            assert setting.model == "qwen3_moe"
    spread = case_of(next(one for one, trial in work if trial.benign == "two_ranks_and_one"), resolve_model("qwen3"),
                     ("lmdeploy", "vllm"))  # fmt: skip
    assert (spread.at("candidate").layout.tp, spread.at("reference").layout.tp) == (2, 1)
    found = summary([{**control(alarm=True), "benign": "near_tie"}, control(alarm=False)], FACTS)
    assert found["differences"]["near_tie"]["trials"] == found["differences"]["near_tie"]["alarms"] == 1
    assert "| N3 |" in render(found)


def test_trials_of_one_launch_come_together() -> None:
    plain, other = Setting(), Setting(batch="ends")
    trials = [Trial("f", at, "candidate", "lmdeploy", {}, None, "") for at in range(5)]
    groups = by_launch(zip([other, plain, plain, other, plain], trials, strict=True))
    assert [(one.batch, [trial.number for _, trial in some]) for one, some in groups.items()] == [
        ("plain", [1, 2, 4]),
        ("ends", [0, 3]),
    ]
    assert setting_of(FAULTS["stale_row"], "qwen3") == other


def test_clean_runs_of_all_batches_share_a_launch_that_they_fit_in() -> None:
    info = resolve_model("qwen3")
    work = controls([Setting(batch=batch) for batch in batches()] + [Setting(tp=2, live=False)])
    launch, alone = by_launch(work)
    assert (launch.batch, alone.tp, len(by_launch(work)[launch])) == (ANY, 2, len(batches()))
    need = capacity(case_of(launch, info, ("lmdeploy", "vllm")))
    for setting, _ in by_launch(work)[launch]:
        one = capacity(case_of(setting, info, ("lmdeploy", "vllm")))
        assert one.max_model_len <= need.max_model_len and one.max_batch <= need.max_batch, setting.name
        assert one.max_prefill_tokens <= need.max_prefill_tokens and one.num_blocks <= need.num_blocks, setting.name


def test_cases_are_those_of_the_setting() -> None:
    info = resolve_model("qwen3")
    case = case_of(Setting(batch="late", dtype="float16"), info, ("lmdeploy", "vllm"))
    assert [(one.name, len(one.token_ids), one.arrival) for one in case.requests] == [
        ("a", 13, 0),
        ("b", 7, 0),
        ("c", 150, 3),
    ]
    assert (case.dtype, case.numerics.candidate, case.numerics.reference) == ("float16", "native", "fp32-internal")
    for batch in batches():
        ids = [one.token_ids for one in requests_of(batch, info.vocab_size)]
        assert len({one[0] for one in ids}) == len(ids)
    with pytest.raises(UserError, match="no batch 'ploin'"):
        requests_of("ploin", 1024)


def test_a_journal_goes_on_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(record("norm_factor"))
    file = tmp_path / "trials.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    again = Journal(tmp_path)
    assert set(again.done) == {"norm_factor-candidate-0"}
    again.add(record("norm_factor", 1))
    assert set(Journal(tmp_path).done) == {"norm_factor-candidate-0", "norm_factor-candidate-1"}


def test_another_plan_is_refused(tmp_path: Path) -> None:
    check_same(tmp_path, {"seed": 1})
    check_same(tmp_path, {"seed": 1})
    with pytest.raises(UserError, match="holds another drill"):
        check_same(tmp_path, {"seed": 2})


def test_what_it_comes_to() -> None:
    records = [
        record("norm_factor"),
        record("norm_factor", 1, side="reference"),
        record("weight_rows", path="none"),
        record("embedding_row"),
        control(),
        control(alarm=True),
    ]
    found = summary(records, FACTS)
    overall = {name: (one["hits"], one["count"]) for name, one in found["rates"].items()}
    assert overall["found"] == (3, 4) and overall["side"] == (2, 3) and overall["right"] == (2, 4)
    assert found["by_fault"]["norm_factor"]["right"]["hits"] == 1
    assert [one["id"] for one in found["misses"]] == ["norm_factor-candidate-1", "weight_rows-candidate-0"]
    assert found["false_alarms"]["hits"] == 1 and found["goals"]["false_alarms"] is False
    assert found["goals"]["found"] is False and found["seconds"] == 10.0

    text = render(found)
    assert "4 trials with a known fault, 2 without, seed 3, on the simulated NPU" in text
    assert "| all | 4 | 75.0 % (30.1 to 95.4) |" in text
    assert "`weight_rows-candidate-0`" in text and "nothing was found. aligned" in text
    assert "## False alarms" in text and "operator of the candidate at layers.0.mlp.down" in text


def test_a_clean_summary_says_none() -> None:
    found = summary([record("norm_factor"), control()], FACTS)
    assert not found["misses"] and found["goals"] == dict.fromkeys(found["goals"], True)
    text = render({**found, "quick": True})
    assert "None." in text and "## False alarms" not in text and "quick drill" in text
    assert summary([record("norm_factor")], FACTS)["goals"]["false_alarms"] is None


def test_cells() -> None:
    assert cell(Rate(81, 263).to_dict()) == "30.8 % (25.5 to 36.6)" and cell(Rate(0, 0).to_dict()) == "–"


def test_no_line_of_text_stands_right_behind_a_table_or_list() -> None:
    """Markdown would take it for a row, or for more of the last item."""
    facts = {**FACTS, "quick": True, "versions": {"vllm": {"vllm": "1"}}}
    lines = render(summary([record("norm_factor")], facts)).split("\n")
    for one, following in pairwise(lines):
        if one.startswith(("|", "* ")):
            assert not following or following.startswith(("|", "* ")), (one, following)
    assert "* vllm: vllm 1" in lines


def test_a_refusal_names_its_condition_and_a_clean_run_that_is_refused_is_an_alarm() -> None:
    trial = draw(FAULTS["input_ids_shifted"], "reference", "vllm", 1, 0)
    false = replace(recordings.condition("false", "token_ids"), sides=("reference",), required=True)
    names = ("a", "b", "c")
    answer = told(trial, Report(conditions=(false,)), names, "refused", 1.0)
    assert answer.score is not None and answer.score.right, answer.score
    assert answer.findings[0]["path"] == "INPUT"
    for others in (
        (recordings.condition("false"),),
        (replace(false, sides=("candidate",)),),
        (replace(false, allowed=True),),
    ):
        score = told(trial, Report(conditions=others), names, "refused", 1.0).score
        assert score is not None and not score.right
    clean = replace(trial, fault="", expected=None)
    assert told(clean, Report(conditions=(false,)), names, "refused", 1.0).alarm
