"""Recorded calls against the rules: right ones hold, and a wrong one is told where and how often it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from align.attention.audit import audit_side, known_harmless
from align.attention.explain import argument_findings, with_arguments
from align.attention.model import Model, model_of
from align.attention.tables import rows_of
from align.fa import Call
from align.fa.files import Records, Step, read_records
from align.fa.rules import rule
from align.findings import Finding
from align.models import qwen3
from align.sentences import text_of
from tests.unit.align.attention.recorded_calls import AT, MODEL, SCALE, atb, atb_paged, fused, left, paged, steps

ALL = (0, 1, 2)


@pytest.mark.parametrize(("prefill", "decode"), [(fused(), paged()), (atb(), atb_paged())])
def test_right_calls_break_no_rule_that_changes_a_result(tmp_path: Path, prefill: Call, decode: Call) -> None:
    made: dict[Step, Sequence[tuple[Call, Sequence[int]]]] = {
        steps("prefill"): [(prefill, ALL)],
        steps("decode", 1): [(decode, ALL)],
    }
    found = audit_side(left(tmp_path, made), MODEL)
    assert found.observable and not found.errors and not found.of("WARN") and not found.unseen
    assert found.calls == 6 and found.distinct == 2 and found.held > 20
    assert found.phases == ("prefill", "decode")
    assert [(one.phase, one.calls) for one in found.looked] == [("prefill", 3), ("decode", 3)]
    assert "fa.scale.model" in found.looked[0].rules and not found.looked[0].unseen


def test_a_wrong_call_is_told_with_its_place_and_counted(tmp_path: Path) -> None:
    made: dict[Step, Sequence[tuple[Call, Sequence[int]]]] = {
        steps("prefill"): [(fused(), (0,)), (fused(actual_seq_lengths=[3, 5]), (1, 2))],
        steps("prefill", 0, run=2): [(fused(), (0,)), (fused(actual_seq_lengths=[3, 5]), (1, 2))],
        steps("prefill", 0, run=1, rank=1): [(fused(), ALL)],
    }
    found = audit_side(left(tmp_path, made), MODEL)
    group = next(one for one in found.errors if one.rule == "fa.lengths.q-raw")
    assert (group.layer, group.layers, group.first.step, group.ranks, group.runs) == (1, (1, 2), 0, (0,), (1, 2))
    assert (group.calls, group.steps, group.variants, group.at) == (4, 2, 1, AT)
    assert group.arguments["actual_seq_lengths"] == "[3, 5]"
    finding = argument_findings({"reference": found})[0]
    assert (finding.path, finding.kind, finding.side, finding.layer) == ("FA", "arguments", "reference", 1)
    assert (finding.phase, finding.step, finding.ranks) == ("prefill", 0, (0,))
    assert finding.evidence["site"] == list(AT) and finding.evidence["rule"] in {one.rule for one in found.errors}
    assert "plain lengths" in " ".join(one.summary for one in argument_findings({"reference": found}))
    chinese = text_of(json.loads(json.dumps(finding.evidence["sentence"])), "zh")
    assert finding.evidence["message"]["zh"] in chinese and "原文" not in chinese


def test_the_scale_of_the_model_and_its_windows_are_known(tmp_path: Path) -> None:
    """F24 and F26 of the catalogue: 1/sqrt(head_dim) instead of the model's scale, and a window that is ignored."""
    model = Model(1, "bfloat16", 0.5, 1e-6, 128, 4, 2, (0, 2, 0))
    found = audit_side(left(tmp_path, {steps("prefill"): [(fused(), ALL)]}), model)
    told = {one.rule: one for one in found.errors}
    assert told["fa.scale.model"].layers == ALL and told["fa.scale.model"].facts["wanted"] == 0.5
    assert told["fa.mask.window-ignored"].layers == (1,)


def test_a_call_before_an_operator_that_raised_is_judged(tmp_path: Path) -> None:
    left(tmp_path, {steps("prefill"): [(fused(atten_mask="fp16[2048,2048]@npu=causal"), ALL)]})
    file = tmp_path / "rank0.jsonl"
    lines = [line for line in file.read_text().splitlines() if '"seen"' not in line]
    file.write_text("\n".join(lines) + '\n{"run": 1, "st')
    records = read_records(tmp_path)
    assert records is not None
    group = next(one for one in audit_side(records, MODEL).errors if one.rule == "fa.mask.dtype")
    assert (group.layers, group.calls) == ((0,), 1)


def test_what_could_not_be_described_is_no_pass() -> None:
    found = audit_side(Records(failures={"npu_x": "ValueError: no"}), MODEL)
    assert not found.observable and found.unseen == ("npu_x: ValueError: no",)


def test_an_argument_at_or_before_a_finding_is_its_likely_cause(tmp_path: Path) -> None:
    audits = {"candidate": audit_side(left(tmp_path, {steps("prefill"): [(fused(scale=1.0), (1, 2))]}), MODEL)}
    behind = Finding("B", "operator", "candidate", "layers.1.attn.out", 1)
    before = Finding("B", "operator", "candidate", "layers.0.attn.out", 0)
    other = Finding("B", "operator", "reference", "layers.2.attn.out", 2)
    weights = Finding("B", "weights", "candidate", "layers.2.mlp.up", 2)
    tokens = Finding("UNLOCATED", "tokens")
    found = with_arguments([behind, before, other, weights, tokens], audits)
    assert [one.path for one in found] == ["B", "B", "B", "B", "FA", "UNLOCATED"]
    likely = [one for one in found if "likely" in one.evidence]
    assert likely[0].evidence["likely_rules"] == ["fa.scale.model"] and likely[0].checkpoint == "layers.1.attn.out"
    assert [one.kind for one in likely] == ["operator", "tokens"]
    assert "layer 1, prefill: fa.scale.model" in text_of(likely[0].evidence["likely"])
    assert with_arguments([behind], {}) == (behind,)


def test_known_warnings_are_of_rules_that_there_are() -> None:
    for row in rows_of("harmless.tsv"):
        known = rule(row["rule"])
        assert known is not None and known.severity != "ERROR" and row["en"] and row["zh"] and row["source"]
        assert row["engine"] in ("", "lmdeploy", "vllm") and row["operator"] in ("", *known.covered)
    operator = "npu_fused_infer_attention_score"
    assert known_harmless("fa.layout.packed-dim", "vllm", operator)["zh"]
    assert known_harmless("fa.layout.packed-dim", "lmdeploy", operator) == {}


def test_facts_of_a_preset_and_of_a_model_that_has_no_table() -> None:
    found = model_of(qwen3.CONFIG, 2, "bfloat16")
    assert found.scale == pytest.approx(SCALE) and found.head_dim == 128
    assert model_of({"architectures": ["Unheard"]}, 2, "float16") == Model(2, "float16")
