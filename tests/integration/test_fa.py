"""Arguments of attention in real engines: clean runs break no rule, and each wrong argument is named with its rule,
operator, layer and phase, on the right side and on no other; also where the operator then refuses the call.

Most of it is ``make extended``.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from align.oracle import Oracle
from align.trace.reader import Trace
from tests.integration.argument_faults import FAULTS, argument_patch
from tests.integration.support import ENGINES, run_align
from tests.integration.test_batches import BATCHES, ran

pytestmark = pytest.mark.timeout(600)
#: F24 of the catalogue, literally: it has a test of its own, of arguments and numbers together.
F24 = "scale_of_head_dim"
#: One that the operator computes with, and one that it refuses, of each engine.
_USUAL = (
    ("candidate", "scale_omitted"), ("candidate", "mask_dtype"), ("reference", "raw_lengths"),
    ("reference", "mask_dtype"),
)  # fmt: skip
_CASES = [
    pytest.param(side, name, marks=() if (side, name) in _USUAL else pytest.mark.extended, id=f"{ENGINES[side]}-{name}")
    for side in SIDES
    for name in FAULTS[ENGINES[side]]
    if name != F24
]


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and output."""
    done = run_align("run", "--quiet", "--out", str(out), *arguments, timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def errors(result: dict[str, Any], side: str) -> list[dict[str, Any]]:
    return [one for one in result["arguments"][side]["groups"] if one["severity"] == "ERROR"]


@pytest.mark.parametrize(("side", "name"), _CASES)
def test_a_wrong_argument_is_named(side: str, name: str, tmp_path: Path) -> None:
    fault = FAULTS[ENGINES[side]][name]
    patch = argument_patch(ENGINES[side], name, tmp_path)
    # lmdeploy's kernels take no window, which is a false condition.
    allowed = ("--allow", "window") if fault.model == "mistral" else ()
    code, result, output = run(
        tmp_path / "run", "--model", fault.model, "--max-new-tokens", "4", "--no-tensors", "--patch", f"{side}={patch}",
        *allowed,
    )  # fmt: skip
    assert (code, result["verdict"]) == (1, "diverged"), output
    # lmdeploy gives its operators no window at all (the test below), and no other fault is in this model.
    windows = {"fa.mask.atb-window"} if fault.model == "mistral" else set()
    mine = [one for one in result["findings"] if one["path"] == "FA" and one["evidence"]["rule"] not in windows]
    assert {one["side"] for one in mine} == {side}
    told = {(one["evidence"]["rule"], one["evidence"]["operator"], one["phase"]): one for one in mine}
    assert (fault.rule, fault.operator, fault.phase) in told, list(told)
    found = told[fault.rule, fault.operator, fault.phase]
    assert (found["layer"], found["step"]) == (fault.layer, 0 if fault.phase == "prefill" else 1)
    assert found["evidence"]["site"] and found["evidence"]["arguments"]
    others = {one["rule"] for one in errors(result, next(other for other in SIDES if other != side))}
    assert others == windows
    # Where the operator refused the call, its own complaint is told too.
    assert bool(result["reason"]) == (result["tokens"] is None)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.extended
def test_numbers_that_are_wrong_name_the_argument_as_their_cause(side: str, tmp_path: Path) -> None:
    patch = argument_patch(ENGINES[side], "scale_omitted", tmp_path)
    code, result, output = run(tmp_path / "run", "--model", "qwen3", "--no-confirm", "--patch", f"{side}={patch}")
    first = result["findings"][0]
    assert (code, first["path"], first["side"], first["checkpoint"]) == (1, "B", side, "layers.2.attn.out"), output
    assert first["evidence"]["likely_rules"] == ["fa.scale.model"]
    assert any(
        row["name"] == "scale" and row["verdict"] == "different"
        for pair in result["arguments_beside"]
        for row in pair["rows"]
    )


@pytest.mark.parametrize("side", [pytest.param("candidate"), pytest.param("reference", marks=pytest.mark.extended)])
def test_one_over_the_root_of_head_dim_in_the_place_of_the_models_scale(side: str, tmp_path: Path) -> None:
    """F24 of the catalogue. The first token of a request sees one key, so that no scale is wrong there."""
    fault = FAULTS[ENGINES[side]][F24]
    patch = argument_patch(ENGINES[side], F24, tmp_path)
    code, result, output = run(tmp_path / "run", "--model", fault.model, "--no-confirm", "--patch", f"{side}={patch}")
    first = result["findings"][0]
    assert (code, first["path"], first["side"], first["checkpoint"]) == (1, "B", side, "layers.2.attn.out"), output
    assert first["evidence"]["likely_rules"] == [fault.rule]
    with closing(Trace(tmp_path / "run" / side / "trace")) as trace, Oracle(trace) as oracle:
        (judged,) = oracle.judge(["layers.2.attn.out"])
    assert judged.tokens is not None
    wrong = {place.position for place, ratio in zip(judged.places, judged.tokens.ratio, strict=True) if ratio > 1}
    assert wrong and 0 not in wrong
    (fit,) = (one for one in result["diagnosis"]["fits"] if one["kind"] == "attention_scale")
    found = fit["parameters"]
    assert (result["diagnosis"]["fault"], result["diagnosis"]["side"]) == ("attention_scale", side)
    assert (found["expected"], found["named"]) == (pytest.approx(1 / 12), ["1/sqrt(head_dim)"])
    assert found["ratio"] == pytest.approx((144 / 128) ** 0.5, rel=1e-3)
    told = {(one["phase"], one["layer"]) for one in result["findings"] if one["path"] == "FA" and one["side"] == side}
    assert told == {("prefill", 2), ("decode", 2)}
    assert {one["evidence"]["rule"] for one in result["findings"] if one["path"] == "FA"} == {fault.rule}
    items = {item["id"]: item for one in result["checklists"] for item in one["items"]}
    assert items["000-Q06"]["state"] == "failed" and fault.rule in items["000-Q06"]["what"]


@pytest.mark.extended
def test_heads_of_the_whole_model_on_one_rank(tmp_path: Path) -> None:
    patch = argument_patch("vllm", "heads_not_split", tmp_path)
    code, result, output = run(
        tmp_path / "run", "--model", "qwen3", "--tp", "2", "--max-new-tokens", "4", "--no-tensors", "--no-ladder",
        "--patch", f"reference={patch}",
    )  # fmt: skip
    assert code == 1, output
    told = {one["rule"]: one for one in errors(result, "reference")}
    assert told["fa.layout.query-heads"]["layer"] == FAULTS["vllm"]["heads_not_split"].layer


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        ("qwen3", False),
        pytest.param("smollm2", False, marks=pytest.mark.extended),
        pytest.param("gemma2", False, marks=pytest.mark.extended),
        pytest.param("qwen3", True, marks=pytest.mark.extended),
    ],
)
def test_a_clean_run_breaks_no_rule(model: str, prefix: bool, tmp_path: Path) -> None:
    if prefix:
        requests, tokens, more = BATCHES["a prefix, one after the other"]
        code, result = ran(tmp_path, requests, tokens, *more)
    else:
        code, result, _ = run(tmp_path / "run", "--model", model)
    assert code == 0
    for side in SIDES:
        audit = result["arguments"][side]
        assert audit["observable"] and not audit["unseen"] and {"prefill", "decode"} <= set(audit["phases"])
        assert not errors(result, side)
        assert all(one["known"] for one in audit["groups"] if one["severity"] in ("WARN", "REMIND")), audit["groups"]
    verdicts = {row["verdict"] for pair in result["arguments_beside"] for row in pair["rows"]}
    assert verdicts == {"equal", "benign"}


@pytest.mark.extended
def test_they_are_not_recorded_where_nobody_wants_them(tmp_path: Path) -> None:
    code, result, _ = run(tmp_path / "run", "--model", "qwen3", "--max-new-tokens", "4", "--no-fa")
    assert code == 0
    assert all(not audit["observable"] and audit["unseen"] for audit in result["arguments"].values())
    assert not (tmp_path / "run" / "candidate" / "fa").exists()
