"""What a case refuses, the table of kinds, results that are not finite, patterns, and cases that are thinned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import align.fits
from align.checkpoints import recompute
from align.findings import PATHS
from align.fits import FitCase, explain, kinds
from align.fits.attend import attend
from align.fits.constants import named
from align.fits.measured import Measured
from align.fits.precision import int8, rounded
from align.fits.search import minimise
from align.fits.thin import thinned
from tests.unit.align.fits import synthetic as s

Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref": torch.zeros(3, 4)}, r"recorded \[64, 256\], expected \[3, 4\]"),
        ({"noise": torch.zeros(3)}, r"bounds \[3\]"),
        ({"positions": torch.arange(3)}, r"64 rows, positions \[3\]"),
        ({"requests": ("r0",)}, "64 rows, 1 names"),
        ({"inputs": {"gate": torch.zeros(1)}}, "linear has no input 'gate'; valid: x, weight, bias"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"bad": torch.zeros(64), "ref": torch.zeros(64)}, "needs rows of channels"),
        ({"bad": torch.zeros(64, 256, dtype=torch.int64)}, "integers are equal or not"),
    ],
)
def test_a_case_that_does_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(s.linear_case(), **changes)


def test_the_table_is_complete() -> None:
    folder = Path(align.fits.__file__).parent
    proposed: set[str] = set()
    for path in folder.glob("*.py"):
        proposed |= set(re.findall(r'"([a-z]+(?:_[a-z]+)*)"', path.read_text(encoding="utf-8")))
    assert [name for name in kinds() if name not in proposed] == []
    for kind in kinds().values():
        assert kind.path in PATHS
        assert set(kind.more_general) <= kinds().keys() - {kind.name}
        for text in (kind.zh, kind.check_zh):
            assert re.search("[\u4e00-\u9fff]", text), kind.name
        assert kind.sentence("en") == kind.en != kind.sentence("zh") and kind.check("en") != kind.check("zh")


# ------------------------------------------------------------------------------------------------------- not finite


def test_nan_names_the_first_row_and_its_inputs() -> None:
    case = s.linear_case()
    bad = case.bad.clone()
    bad[7:9, 3] = torch.nan
    requests = tuple("a" if row < 5 else "b" for row in range(64))
    (fit,) = explain(replace(case, bad=bad, requests=requests, positions=torch.arange(64) + 100))
    assert fit.kind == "nonfinite"
    assert (fit.parameters["position"], fit.parameters["channel"], fit.parameters["request"]) == (107, 3, "b")
    assert fit.parameters["inputs_finite"] == {"x": True, "weight": True} and "inputs there are finite" in fit.text
    x = case.inputs["x"].clone()
    x[7, 0] = torch.inf
    (fit,) = explain(replace(case, bad=bad, inputs={**case.inputs, "x": x}))
    assert "not finite there: the input x" in fit.text


def test_overflow_and_saturation_of_float16() -> None:
    small = s.linear_case(dtype=torch.float16)
    assert isinstance(small.noise, Tensor)
    big = (small.bad.float() * 30000).half()
    case = replace(small, bad=big, ref=small.ref * 30000, noise=small.noise * 30000)
    (fit,) = explain(case)
    assert fit.kind == "overflow" and fit.parameters["dtype"] == "float16" and fit.parameters["infinite"] > 100
    (fit,) = explain(replace(case, bad=big.clamp(-65504, 65504)))
    assert fit.kind == "clamped" and fit.parameters["named"] == ["float16"]
    (fit,) = explain(replace(case, bad=big.masked_fill(torch.arange(256) == 9, torch.inf).clamp(max=torch.inf)))
    assert fit.kind == "nonfinite"


def test_bfloat16_inside_a_float16_model() -> None:
    x, weight = s.normal(64, 256, dtype=torch.float16), s.weights(256, 1, torch.float16)
    exact = recompute.rms_norm(x, weight, 1e-6, torch.float64)
    inputs = {"x": x, "weight": weight}
    low = x.bfloat16(), weight.bfloat16()
    for bad in (
        s.rms_norm(x, weight, 1e-6).bfloat16(),
        s.rms_norm(*low, 1e-6),
        low[0] * torch.rsqrt(low[0].square().mean(-1, keepdim=True) + 1e-6) * low[1],
    ):
        found = explain(s.case("rms_norm", bad.half(), exact, inputs, {"eps": 1e-6}))
        assert [fit.kind for fit in found] == ["cast"]
        assert found[0].parameters["dtype"] == "bfloat16"


# --------------------------------------------------------------------------------------------------------- patterns


def test_without_inputs_the_profile_of_positions_is_told() -> None:
    case = s.attention_case()
    q, k, v = s.qkv()
    bad = s.attention(q, k, v, s.HIDDEN**-0.5)
    found = explain(s.changed(case, bad, inputs={}))
    assert [fit.kind for fit in found][0::2] == ["right_at_first_position", "unexplained"]
    assert not any(fit.explains for fit in found)
    behind = torch.arange(64)[:, None] - torch.arange(64)[None]
    bad = s.attention(q, k, v, s.DIM**-0.5, (behind < 0) | (behind >= 16))
    windowed = replace(case, parameters={"window": 16}, inputs={})
    assert explain(s.changed(windowed, bad))[0].kind == "starts_at_window"


def test_an_error_that_grows_with_the_position_is_told() -> None:
    case = s.linear_case()
    noise = s.normal(64, 256, seed=3, dtype=torch.float32) * torch.linspace(0, 0.5, 64)[:, None]
    kinds_found = [fit.kind for fit in explain(s.changed(case, case.bad.float() + noise))]
    assert kinds_found[0] == "grows_with_position" and kinds_found[-1] == "unexplained"


def test_patterns_are_json() -> None:
    case = s.linear_case()
    for fit in explain(s.changed(case, case.bad + s.normal(64, 256, seed=3))):
        assert json.loads(json.dumps(fit.to_dict()))["kind"] == fit.kind


# ------------------------------------------------------------------------------------------------------ large cases


def test_a_large_case_is_thinned_and_names_its_own_rows() -> None:
    x, weight = s.normal(2000, 256, scale=0.02), s.weights(256, 1)
    bad = s.rms_norm(x, weight, 1e-6)
    bad[1500:1520] = s.rms_norm(x[1500:1520], weight, 1e-5)
    exact = recompute.rms_norm(x, weight, 1e-6, torch.float64)
    case = s.case("rms_norm", bad, exact, {"x": x, "weight": weight}, {"eps": 1e-6})
    fewer = thinned(Measured(case))
    assert len(fewer.case.bad) < 1100 and set(range(1500, 1520)) <= set(fewer.rows.tolist())
    torch.testing.assert_close(fewer.case.inputs["x"], x[fewer.rows])
    found = explain(case)
    assert found[0].kind == "eps" and found[0].parameters["tokens"] == list(range(1500, 1520))
    assert found[0].parameters["eps"] == 1e-5
    assert thinned(Measured(s.linear_case())).rows.tolist() == list(range(64))


# ------------------------------------------------------------------------------------------------------------ tools


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_is_the_recomputed_one(window: int | None, softcap: float | None) -> None:
    q, k, v = s.qkv()
    at, sinks = torch.arange(s.T), torch.linspace(-1, 2, s.HEADS)
    for sink in (None, sinks):
        wanted = recompute.attention(q, at, k, v, 0.3, window, torch.float64, softcap=softcap, sinks=sink)
        found = attend(q, at, k, v, 0.3, s.BF16, window=window, softcap=softcap, sinks=sink)
        torch.testing.assert_close(found.value, wanted.value, rtol=1e-10, atol=1e-12)
        if sink is None and softcap is None:
            torch.testing.assert_close(found.magnitude, wanted.magnitude, rtol=1e-9, atol=1e-12)


def test_masks_one_key_at_a_time() -> None:
    q, k, v = s.qkv(length=6)
    at = torch.arange(6)
    every: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"ahead": 1}, [list(range(min(row + 2, 6))) for row in range(6)]),
        ({"ahead": -1}, [list(range(row)) for row in range(6)]),
        ({"first": 2}, [list(range(2, row + 1)) for row in range(6)]),
        ({"causal": False}, [list(range(6))] * 6),
    ]
    for arguments, seen in every:
        found = attend(q, at, k, v, 0.3, s.BF16, **arguments).value
        for row, keys in enumerate(seen):
            if not keys:
                assert bool(found[row].isnan().all())
                continue
            scores = k[keys, 1].double() @ q[row, 5].double() * 0.3
            wanted = torch.softmax(scores, 0) @ v[keys, 1].double()
            torch.testing.assert_close(found[row, 5], wanted)


def test_constants_are_named() -> None:
    known = {"head_dim": 64, "hidden": 256, "tp": 4, "routed_scaling_factor": 2.5}
    assert named(0.12503, known, 1e-3) == ["1/sqrt(head_dim)"]
    assert named(2.5, known, 1e-3) == ["routed_scaling_factor"]
    assert named(4.0, known, 1e-3) == ["the tp size"]
    assert named(1.4427, known, 1e-3) == ["log2(e)"]
    assert named(1.37, known, 1e-3) == []


def test_the_best_number_is_found() -> None:
    best, cost = minimise(lambda x: (x - 0.3) ** 2, [-1.0, 0.0, 1.0])
    assert best == pytest.approx(0.3, abs=1e-6) and cost < 1e-12
    assert minimise(lambda x: x if x > 0 else float("nan"), [-1.0, 0.5, 1.0])[0] == pytest.approx(0.0, abs=1e-6)


def test_rounding_saturates() -> None:
    x = torch.tensor([1.06, 1000.0, -1000.0])
    assert rounded(x, torch.float8_e4m3fn).tolist() == [1.0, 448.0, -448.0]
    assert int8(torch.tensor([[127.0, 1.4], [254.0, 3.2]]), (-1,)).tolist() == [[127.0, 1.0], [254.0, 4.0]]


def router_case(bad: Callable[[Tensor, Tensor], Tensor]) -> FitCase:
    logits = s.normal(64, 16, scale=2.0)
    scores = torch.softmax(logits.double(), -1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(4, -1).indices, 1.0)
    kept = scores * chosen
    ref = 2.5 * kept / kept.sum(-1, keepdim=True)
    made = bad(logits.double() * chosen, kept).bfloat16()
    return FitCase(
        "layers.0.moe.topk_weights",
        "topk_weights",
        made,
        ref,
        0.016,
        torch.arange(64),
        "bfloat16",
        inputs={"logits": logits},
        parameters={"routed_scaling_factor": 2.5},
    )


def test_weights_of_experts() -> None:
    def normalised(kept: Tensor) -> Tensor:
        return kept / kept.sum(-1, keepdim=True)

    assert explain(router_case(lambda logits, kept: 2.5 * normalised(kept))) == ()
    for bad, function, scaling, renormalised in (
        (lambda logits, kept: normalised(kept), "softmax", 1.0, True),
        (lambda logits, kept: 2.5 * kept, "softmax", 2.5, False),
        (lambda logits, kept: logits, "logits", 1.0, False),
    ):
        (fit,) = explain(router_case(bad))
        assert fit.kind == "router_weights"
        assert fit.parameters == {"function": function, "renormalised": renormalised, "scaling": scaling}
