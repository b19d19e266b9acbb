"""The known problems of seed 000's last table, as a run shows them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from align.case.schema import CaseLayout
from align.findings import Finding
from align.result.symptom import SymptomRow, symptom_of
from align.sentences import said, text_of
from tests.unit.align.compare.test_locate import comparison as tensors
from tests.unit.align.result.test_symptom import LONG, seen
from tests.unit.align.run import recordings

MOE = {"num_experts": 8, "num_experts_per_tok": 2}


def row(name: str, config: dict[str, Any] | None = None, **more: Any) -> SymptomRow:
    ground = more.pop("ground", {})
    info = replace(recordings.info(), config={**recordings.info().config, **(config or {})})
    found = symptom_of(*seen({"r0": LONG, "r1": LONG}, ground={"info": info, **ground}, tensors=tensors({}), **more))
    return next(one for one in found.rows if one.row == name)


def weights(**evidence: Any) -> Finding:
    about = {"parameter": "model.layers.0.mlp.experts.0.up_proj.weight", **evidence}
    return Finding("B", "weights", side="candidate", checkpoint="layers.0.moe.routed", layer=0, evidence=about)


def record(status: str, why: str = "") -> dict[str, Any]:
    return {"kind": "moe.routed", "status": status, "why": why, "parameter": "p"}


def test_experts_that_were_not_loaded() -> None:
    found = row("000-K-01", MOE, findings=(weights(),))
    assert found.state == "shown" and "experts.0.up_proj" in found.why
    packed = row("000-K-01", MOE, findings=(weights(remark="the checkpoint holds …"),))
    assert "copies nothing" in packed.why and "EP rank" in text_of(packed.told, "zh")


@pytest.mark.parametrize(
    ("config", "audits", "state"),
    [
        ({}, {}, "not shown"),
        (MOE, {}, "not observable"),
        (MOE, {"candidate": [record("equal")], "reference": [record("equal")]}, "not shown"),
        (MOE, {"candidate": [record("equal")], "reference": [record("not observable", "odd")]}, "not observable"),
    ],
)
def test_experts_that_were_loaded_or_not_looked_at(config: dict[str, Any], audits: Any, state: str) -> None:
    assert row("000-K-01", config, ground={"audits": audits}).state == state


def test_zero_experts() -> None:
    wrong = Finding("B", "unexplained", side="candidate", checkpoint="layers.1.moe.out", layer=1)
    assert row("000-K-02", MOE, findings=(wrong,)).state == "not shown", "the model has none"
    config = {**MOE, "zero_expert_num": 4}
    assert row("000-K-02", config).state == "not shown"
    found = row("000-K-02", config, findings=(wrong,))
    assert found.state == "shown" and "original_input * weight" in found.why and "4 zero experts" in found.why


def dp(*prompts: tuple[int, ...]) -> Any:
    case = recordings.case()
    requests = [
        one.model_copy(update={"token_ids": ids, "dp_rank": rank})
        for rank, (one, ids) in enumerate(zip(case.requests, prompts, strict=True))
    ]
    return case.model_copy(update={"layout": CaseLayout(tp=1, dp=2, ep=1), "requests": tuple(requests)})


def test_ranks_whose_tokens_part() -> None:
    same = dp((5, 6), (5, 6))
    parts = (*LONG[:4], *(one + 40 for one in LONG[4:]))
    report, ground = seen({"r0": LONG, "r1": parts}, ground={"case": same})
    found = next(one for one in symptom_of(report, ground).rows if one.row == "000-K-03")
    assert found.state == "shown"
    assert "on the candidate, r0 and r1" in found.why and "part at token 4: 5 and 45" in found.why
    assert "dist.broadcast(next_token, src=0)" in found.why
    assert row("000-K-03", ground={"case": same}).state == "not shown"


def test_requests_of_their_own_need_no_common_token() -> None:
    found = row("000-K-03", ground={"case": dp((5, 6), (7, 8))})
    assert found.state == "not shown" and "of its own" in found.why
    assert row("000-K-03").state == "not shown", "one group"


def diagnosed(checkpoint: str, kind: str) -> Any:
    fit = SimpleNamespace(kind=kind, told=said("list.comma", parts=["0.5 times what it should be"]), text="half")
    return SimpleNamespace(checkpoint=checkpoint, fits=(fit,))


@pytest.mark.parametrize(
    ("checkpoint", "kind", "state"),
    [
        ("embed", "factor", "shown"),
        ("layers.1.attn_norm", "factor_tokens", "shown"),
        ("layers.1.mlp.up", "factor", "not shown"),
        ("embed", "order", "not shown"),
    ],
)
def test_a_scale_that_was_left_out(checkpoint: str, kind: str, state: str) -> None:
    found = row("000-K-04", diagnosis=diagnosed(checkpoint, kind))
    assert found.state == state
    if state == "shown":
        assert "0.5 times what it should be" in found.why


def test_a_scale_that_both_sides_may_leave_out_is_not_observable() -> None:
    found = row("000-K-04", {"scale_emb": 12})
    assert found.state == "not observable" and "align golden" in found.why
    assert row("000-K-04", {"scale_emb": 1}).state == "not shown"
