"""``align fa check``, ``align fa rules``, and ``align explain`` of a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from align.cli import explain, fa_check, fa_rules
from align.cli.fa_file import load
from align.errors import UserError
from align.fa import call_record, rules
from align.fa.examples import bases
from align.knowledge import knowledge


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def record(name: str, **arguments: Any) -> dict[str, Any]:
    found = call_record(bases()[name])
    found["arguments"].update(arguments)
    return found


def test_a_right_call_and_a_wrong_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = write(tmp_path / "right.json", record("decode"))
    wrong = write(tmp_path / "wrong.json", [record("decode"), record("decode", sparse_mode=2)])
    assert fa_check.execute([right], "en", False) == 0
    said = capsys.readouterr().out
    assert said.startswith("call 0: npu_fused_infer_attention_score, decode\n") and "0 ERROR, 0 WARN" in said
    assert "the arguments alone" in said.splitlines()[-1]
    assert fa_check.execute([right, wrong], "zh", False) == 1
    said = capsys.readouterr().out
    assert "[ERROR] sparse_mode 2（leftUpCausal）" in said and "(fa.mask.left-up)" in said
    assert said.count("调用 ") == 3


def test_json_holds_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = record("decode", sparse_mode=2)
    del call["context"]["phase"]
    assert fa_check.execute([write(tmp_path / "call.json", call)], "en", True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["exit"] == 1 and said["counts"]["ERROR"] == 1
    (one,) = said["calls"]
    assert one["findings"][0]["rule"] == "fa.mask.left-up"
    assert one["findings"][0]["facts"] == {"q": 1, "kv": 130}
    assert set(one["findings"][0]["said"]) == {"en", "zh"}
    assert one["not_observable"]["fa.lengths.zero-q"] == "the phase of the step"


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = record("decode", block_table="int32[2,2]")
    assert fa_check.execute([write(tmp_path / "call.json", call)], "en", False) == 0
    assert "not observable: fa.paged.table-range, fa.paged.table-repeat (needs: block table" in capsys.readouterr().out


def test_short_forms_and_other_spellings(tmp_path: Path) -> None:
    written = {
        "operator": "torch_npu.npu_fused_infer_attention_score",
        "arguments": {"query": "bf16[8,4,128]@npu", "actual_seq_lengths": "int64[2]=[3,8]", "input_layout": "TND"},
        "context": {"phase": "prefill", "q_lens": [3, 5]},
    }
    (call,) = load(write(tmp_path / "call.json", written))
    assert call.operator == "npu_fused_infer_attention_score"
    assert call.arguments["query"] == bases()["prefill"].arguments["query"]
    assert call.context.q_lens == (3, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "has no call"),
        ("3", "a call is an object"),
        ({"operator": "npu_rms_norm", "arguments": {}}, "npu_rms_norm"),
        ({"operator": "scatter_update_"}, "a call has an operator and arguments"),
        ({"operator": "scatter_update_", "arguments": {"input": "bf16(2)"}}, "no tensor"),
        (
            {"operator": "scatter_update_", "arguments": {"input": {"tensor": {"shape": ["x"], "dtype": "bf16"}}}},
            "shape.0",
        ),
        ({"operator": "scatter_update_", "arguments": {}, "context": {"layer": "first"}}, "layer"),
        ({"operator": "scatter_update_", "arguments": {}, "context": {"phase": "warm"}}, "warm"),
    ],
)
def test_a_file_that_is_no_call_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        load(write(tmp_path / "call.json", content))
    assert "call.json" in refused.value.message and refused.value.hint


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        fa_check.execute([tmp_path / "none.json"], "en", False)
    with pytest.raises(UserError, match="no language"):
        fa_check.execute([], "fr", False)


def test_rules_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert fa_rules.execute(None, None, None, "en", False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rules()) + 1 >= 61
    assert all(one.id in line and one.source in line for one, line in zip(rules(), lines[1:], strict=True))


def test_rules_are_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    fa_rules.execute("torch_npu.npu_scatter_pa_kv_cache", "error", "write", "zh", True)
    said = json.loads(capsys.readouterr().out)
    assert said["count"] == len(said["rules"]) > 5
    assert {one["severity"] for one in said["rules"]} == {"ERROR"}
    assert all("npu_scatter_pa_kv_cache" in one["operators"] for one in said["rules"])
    example = next(one for one in said["rules"] if one["id"] == "fa.write.mode-nz")["example"]
    assert "cache_mode" in example["change"] and "cache_mode" not in example["fails"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("npu_fused", None, None, "en"), "npu_fused"),
        ((None, "FATAL", None, "en"), "FATAL"),
        ((None, None, "masks", "en"), "masks"),
        ((None, None, None, "fr"), "fr"),
    ],
)
def test_filters_that_fit_nothing_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        fa_rules.execute(arguments[0], arguments[1], arguments[2], arguments[3], False)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fa.mask.missing", "references/fa_debug_utils.md"),
        ("fa.mla.pair", "modeling_deepseek.py: forward_attention_absorb, forward_page_attention_absorb"),
        ("fa.lengths.q-raw", "execution_engine.py"),
        ("fa.precision.invalid-rows", "ops/cannbot_dsl/flash_kda.py"),
        ("fa.quant.scale-pair", "ops/ascendc/torch_ops_extension/custom_ops"),
    ],
)
def test_a_rule_says_what_to_read(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    explain.execute([name], "en")
    assert any(line.startswith("read: ") and file in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_rule_is_explained(language: str, capsys: pytest.CaptureFixture[str]) -> None:
    for one in rules():
        assert explain.execute([one.id], language) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{one.id}: [{one.severity}] ") and one.source in said and one.zh in said
        assert "→" in said


def test_an_id_that_is_misspelt_gets_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"no rule fa\.mask\.mising") as refused:
        explain.execute(["fa.mask.mising"], "en")
    assert "fa.mask.missing" in refused.value.hint


def test_no_entry_of_the_knowledge_is_hidden_by_a_rule() -> None:
    assert not [name for name in knowledge().entries if name.startswith("fa.")]
