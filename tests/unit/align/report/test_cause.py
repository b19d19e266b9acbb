"""The cause in one sentence: joined where records join it, and no sentence where none does."""

from __future__ import annotations

from typing import Any

import pytest

from align.report import ending
from align.report.cause import cause_of
from align.report.page import page_of
from align.result.parts import Finding
from align.result.schema import Result
from align.sentences import said, text_of
from tests.unit.align.result import made

EPS: dict[str, Any] = {"condition": "norm_eps", "requested": 1e-6, "observed": [1e-6, 0.5], "where": "eps"}
SET: dict[str, Any] = {"conditions": [EPS], "places": ["model.layers.1.input_layernorm"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        run = made.Run(tmp_path_factory.mktemp("run") / "run", patch, made.wrong_up).go()
        return run.result().model_copy(update={"diagnosis": None})


def one(kind: str, checkpoint: str | None, side: str | None = "candidate", path: str = "B", **evidence: Any) -> Finding:
    layer = int(checkpoint.split(".")[1]) if checkpoint and checkpoint.startswith("layers.") else None
    about = {"path": path, "kind": kind, "side": side, "checkpoint": checkpoint, "layer": layer}
    return Finding.model_validate({**about, "evidence": evidence, "summary": kind})


def told(base: Result, *findings: Finding, lang: str = "en", **changes: Any) -> str:
    found = cause_of(base.model_copy(update={"findings": list(findings), **changes}))
    return "" if found is None else text_of(found, lang)


def norm(checkpoint: str = "layers.1.attn_norm", side: str = "candidate") -> Finding:
    return one("operator", checkpoint, side, operator="rms_norm")


def test_a_configuration_comes_first_and_its_operator_follows(base: Result) -> None:
    findings = (norm(), one("configuration", "layers.1.attn_norm", **SET))
    engine = base.engines["candidate"]
    assert told(base, *findings) == (
        f"Cause: {engine} computes with norm_eps 0.5 instead of 1e-06 in model.layers.1.input_layernorm. "
        "What follows from it: its rms_norm is wrong at layers.1.attn_norm."
    )
    assert told(base, *findings, lang="zh").startswith(f"原因：{engine} 计算时使用的 norm_eps 为 0.5，而应为 1e-06")


@pytest.mark.parametrize(
    "other",
    [
        norm(side="reference"),
        norm("layers.0.attn_norm"),
        norm("layers.1.mlp_norm"),
        one("operator", "layers.1.mlp.up", operator="linear"),
        one("unexplained", "layers.1.attn.o", None),
        one("tokens", None, None, "UNLOCATED"),
    ],
)
def test_what_no_record_joins_is_not_joined(base: Result, other: Finding) -> None:
    assert told(base, other, one("configuration", "layers.1.attn_norm", **SET)) == ""
    assert told(base, other) == ""


def test_weights_that_are_in_each_others_place(base: Result) -> None:
    up, gate = "layers.1.mlp.up", "layers.1.mlp.gate"
    swapped = [
        one("weights", gate, parameter="gate_proj", holds="up_proj"),
        one("weights", up, parameter="up_proj", holds="gate_proj"),
    ]
    assert told(base, *swapped) == "", "nothing shows what follows"
    behind = one("unexplained", "layers.1.mlp.down")
    assert told(base, behind, *swapped).startswith(
        f"Cause: {base.engines['candidate']} holds gate_proj and up_proj in each other's place. What follows from it: "
        "layers.1.mlp.down is wrong"
    )
    assert told(base, one("unexplained", "layers.0.mlp.down"), *swapped) == "", "it is before them"
    # An operator is judged by its own inputs: what is wrong further behind is its own fault.
    assert told(base, one("operator", "layers.1.mlp.down", operator="linear"), *swapped) == ""
    (held, _) = swapped
    assert "holds up_proj as gate_proj" in told(base, behind, held)


def argument(side: str = "reference") -> Finding:
    sentence = said("fa.finding", operator="fia", what="no key", rule="fa.pair", layer=1, layers=1, calls=1)
    return one("arguments", None, side, "FA", operator="fia", rule="fa.pair", sentence=sentence)


def test_an_argument_that_a_finding_names_as_its_cause(base: Result) -> None:
    slots = one("operator", "layers.1.attn.out", "reference", operator="attention", likely_rules=["fa.pair"])
    assert told(base, slots, argument()) == (
        f"Likely cause: {base.engines['reference']} hands fia a wrong argument: no key (fa.pair). "
        "What follows from it: its attention is wrong at layers.1.attn.out."
    )
    assert told(base, slots.model_copy(update={"evidence": {"operator": "x"}}), argument()) == ""


def failure(side: str = "reference", text: str = "fia: no key") -> dict[str, Any]:
    what = said("stopped.failed", method="generate", what=text)
    return {"reason": text, "reason_told": said("stopped.side", side=side, engine="vllm", what=what)}


def test_an_engine_that_fails_in_the_operator_that_it_calls_wrongly(base: Result) -> None:
    engine = base.engines["reference"]
    assert told(base, argument(), **failure()).endswith(f"What follows from it: {engine} failed during generate.")
    assert told(base, argument(), **failure("candidate")) == ""
    assert told(base, argument(), **failure(text="out of memory")) == ""


def test_a_condition_that_is_false_and_was_allowed(base: Result) -> None:
    first = base.conditions[0]
    about = {"name": "norm_eps", "verdict": "false", "sides": ["candidate"], "told": False, "allowed": True}
    about |= {"places": {"candidate": ["model.layers.1.input_layernorm"]}, "observed": {"candidate": 0.5}}
    false = first.model_copy(update={**about, "requested": 1e-6})
    assert "the condition norm_eps does not hold on the candidate, which has 0.5 instead of 1e-06" in told(
        base, norm(), conditions=[false]
    )
    assert told(base, norm(side="reference"), conditions=[false]) == ""
    assert told(base, norm(), conditions=[false.model_copy(update={"name": "block_size"})]) == ""


def test_an_engine_that_fails_is_not_called_diverged(base: Result) -> None:
    failed = base.model_copy(update={"findings": [argument()], **failure()})
    page = page_of(failed)
    assert (failed.verdict, page["verdict_word"], page["verdict"]) == ("diverged", "engine failed", "diverged")
    assert "failed during generate" in page["sentence"] and "iverged" not in page["title"] + page["about"]
    assert page_of(failed, "zh")["verdict_word"] == "引擎出错"
    assert page_of(base)["verdict_word"] == "diverged"
    aligned = base.model_copy(update={"verdict": "aligned", "findings": []})
    assert ending.word_of(aligned) == "aligned"


def test_results_that_are_no_numbers_are_a_failure(base: Result) -> None:
    reason = said("operator.not_finite_one", count=1, at="")
    sentence = said("operator.finding", operator="linear", reasons=[reason])
    nan = one("operator", "layers.1.mlp.up", "reference", operator="linear", sentence=sentence)
    failed = base.model_copy(update={"findings": [nan]})
    page = page_of(failed)
    assert page["verdict_word"] == "engine failed" and "computes what is no number" in page["sentence"]
    assert ending.lead_of(failed) == "lead.not_finite" and ending.lead_of(base) == ""


def test_the_page_has_the_sentence_under_its_heading(base: Result) -> None:
    joined = base.model_copy(update={"findings": [norm(), one("configuration", "layers.1.attn_norm", **SET)]})
    assert page_of(joined)["joined"].startswith("Cause: ")
    assert page_of(base)["joined"] == ""
