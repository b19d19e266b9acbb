"""Every kind of fault is named from what it does to a bf16 operator, and no other kind is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional

from align.fits import Fit, FitCase, explain, kinds
from align.sentences import text_of
from tests.unit.align.fits import synthetic as s
from tests.unit.align.fits.synthetic import changed, rms_norm

Tensor = torch.Tensor
RIGHT = {
    "norm": s.norm_case(),
    "small": s.norm_case(rms=0.02),
    "linear": s.linear_case(),
    "bias": s.linear_case(bias=True),
    "silu": s.silu_case(),
    "add": s.add_case(),
    "attention": s.attention_case(),
    "window": s.attention_case(window=16),
    "rope": s.rope_case(),
}
X, W = RIGHT["norm"].inputs["x"], RIGHT["norm"].inputs["weight"]
SMALL = RIGHT["small"].inputs["x"]
LX, LW = RIGHT["linear"].inputs["x"], RIGHT["linear"].inputs["weight"]
GATE, UP = RIGHT["silu"].inputs["gate"], RIGHT["silu"].inputs["up"]
A, B = RIGHT["add"].inputs["a"], RIGHT["add"].inputs["b"]
Q, K, V = (RIGHT["attention"].inputs[name] for name in "qkv")
SCALE = s.DIM**-0.5
BEHIND = torch.arange(s.T)[:, None] - torch.arange(s.T)[None]
OTHER = s.linear_case(5)
SHUFFLED = torch.randperm(s.HIDDEN, generator=torch.Generator().manual_seed(0))


def scaled(case: FitCase, where: object, factor: float) -> FitCase:
    bad = case.bad.float()
    bad[where] *= factor  # type: ignore[index]
    return changed(case, bad)


def put(case: FitCase, where: object, value: Tensor | float) -> FitCase:
    bad = case.bad.clone()
    bad[where] = value  # type: ignore[index]
    return changed(case, bad)


def attended(hidden: Tensor | None = None, scale: float = SCALE, cap: float | None = None) -> Tensor:
    return s.attention(Q, K, V, scale, hidden, cap)


def int8(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round() * scale


CHANNELS = (slice(None), slice(40, 48))
FAULTS: dict[str, tuple[FitCase, str]] = {
    "F13 eps 1e-5 at rms 0.02": (changed(RIGHT["small"], rms_norm(SMALL, W, 1e-5)), "eps"),
    "eps of no configuration": (changed(RIGHT["small"], rms_norm(SMALL, W, 3e-5)), "eps"),
    "norm × 1.01": (scaled(RIGHT["norm"], ..., 1.01), "factor"),
    "1 + weight": (changed(RIGHT["norm"], rms_norm(X, 1 + W, 1e-6)), "norm_weight"),
    "no weight": (changed(RIGHT["norm"], rms_norm(X, torch.ones_like(W), 1e-6)), "norm_weight"),
    "LayerNorm": (
        changed(RIGHT["norm"], functional.layer_norm(X.float(), (s.HIDDEN,), W.float(), None, 1e-6)),
        "norm_formula",
    ),
    "F14 the other norm's weight": (
        changed(RIGHT["norm"], rms_norm(X, s.weights(s.HIDDEN, 7), 1e-6), weights={"k_norm": s.weights(s.HIDDEN, 7)}),
        "wrong_weight",
    ),
    "norm not called": (changed(RIGHT["norm"], X), "skipped"),
    "8 of 256 rows × 1.05": (scaled(RIGHT["linear"], CHANNELS, 1.05), "factor_channels"),
    "1 row × 1.05": (scaled(RIGHT["linear"], (slice(None), 9), 1.05), "factor_channels"),
    "1 row × 1.02": (scaled(RIGHT["linear"], (slice(None), 9), 1.02), "factor_channels"),
    "rows from token 20 on": (scaled(RIGHT["linear"], (slice(20, None), slice(40, 48)), 1.1), "factor_channels"),
    "1 token × 1.05": (scaled(RIGHT["linear"], 7, 1.05), "factor_tokens"),
    "tokens, each its own": (
        changed(RIGHT["linear"], RIGHT["linear"].bad * torch.linspace(0.5, 2, s.T)[:, None]),
        "factor_tokens",
    ),
    "2 heads × 0.9": (scaled(RIGHT["attention"], (slice(None), slice(2, 4)), 0.9), "factor_heads"),
    "half of the heads lost": (put(RIGHT["attention"], (slice(None), slice(4, 8)), 0.0), "factor_heads"),
    "twice": (scaled(RIGHT["linear"], ..., 2.0), "factor"),
    "sign": (scaled(RIGHT["linear"], ..., -1.0), "sign"),
    "F15 another projection": (changed(RIGHT["linear"], OTHER.bad, others={"mlp.up": OTHER.ref}), "exchanged"),
    "stale": (changed(RIGHT["linear"], OTHER.bad, previous=OTHER.bad), "stale"),
    "stale for some rows": (
        replace(put(RIGHT["linear"], slice(10, 20), OTHER.bad[10:20]), previous=OTHER.bad),
        "stale",
    ),
    "read another input": (
        changed(RIGHT["linear"], functional.linear(OTHER.inputs["x"], LW), others={"mlp_norm": OTHER.inputs["x"]}),
        "wrong_input",
    ),
    "rows permuted": (changed(RIGHT["linear"], RIGHT["linear"].bad.flip(0)), "rows_moved"),
    "two rows exchanged": (put(RIGHT["linear"], [3, 9], RIGHT["linear"].bad[[9, 3]]), "rows_moved"),
    "channels permuted": (changed(RIGHT["linear"], RIGHT["linear"].bad[:, SHUFFLED]), "channels_moved"),
    "halves exchanged": (changed(RIGHT["linear"], RIGHT["linear"].bad.roll(128, 1)), "channels_moved"),
    "two heads exchanged": (
        changed(RIGHT["attention"], RIGHT["attention"].bad[:, [1, 0, 2, 3, 4, 5, 6, 7]]),
        "heads_moved",
    ),
    "BNSD read as BSND": (
        changed(RIGHT["attention"], RIGHT["attention"].bad.transpose(0, 1).reshape(s.T, s.HEADS, s.DIM)),
        "transposed",
    ),
    "a transposed view read as contiguous": (
        changed(RIGHT["linear"], RIGHT["linear"].bad.T.contiguous().reshape(s.T, s.HIDDEN)),
        "transposed",
    ),
    "no bias": (changed(RIGHT["bias"], functional.linear(LX, LW)), "term_missing"),
    "bias twice": (changed(RIGHT["bias"], RIGHT["bias"].bad + RIGHT["bias"].inputs["bias"]), "term_added"),
    "F19 one rank's part": (changed(RIGHT["linear"], LX[:, 128:256] @ LW[:, 128:256].T), "partial_sum"),
    "residual left out": (changed(RIGHT["add"], B), "term_missing"),
    "residual left out for a token": (put(RIGHT["add"], 5, B[5]), "term_missing"),
    "residual twice": (changed(RIGHT["add"], A + A + B), "term_added"),
    "F20 reduced twice": (changed(RIGHT["add"], A + 4 * B, parameters={"tp": 4}), "term_added"),
    "gelu": (changed(RIGHT["silu"], functional.gelu(GATE) * UP), "activation"),
    "gelu_tanh": (changed(RIGHT["silu"], functional.gelu(GATE, approximate="tanh") * UP), "activation"),
    "gate and up exchanged": (changed(RIGHT["silu"], functional.silu(UP) * GATE), "arguments_exchanged"),
    "no up": (changed(RIGHT["silu"], functional.silu(GATE)), "up_missing"),
    "result in fp8": (changed(RIGHT["linear"], RIGHT["linear"].bad.to(torch.float8_e4m3fn)), "cast"),
    "result in int8": (changed(RIGHT["linear"], int8(RIGHT["linear"].bad)), "cast"),
    "input in fp8": (changed(RIGHT["linear"], LX.to(torch.float8_e4m3fn).to(s.BF16) @ LW.T), "cast_input"),
    "weight in int8": (changed(RIGHT["linear"], functional.linear(LX.float(), int8(LW))), "cast_input"),
    "W8A8": (changed(RIGHT["linear"], int8(LX) @ int8(LW).T), "cast_input"),
    "F24 scale of the hidden size": (changed(RIGHT["attention"], attended(scale=s.HIDDEN**-0.5)), "attention_scale"),
    "mscale missing": (changed(RIGHT["attention"], attended(scale=SCALE / 1.59)), "attention_scale"),
    "no scale": (changed(RIGHT["attention"], attended(scale=1.0)), "attention_scale"),
    "the next key is seen": (changed(RIGHT["attention"], attended(BEHIND < -1)), "attention_mask"),
    "no mask": (changed(RIGHT["attention"], attended(BEHIND < -s.T)), "attention_mask"),
    "F26 window + 1": (changed(RIGHT["window"], attended((BEHIND < 0) | (BEHIND >= 17))), "attention_window"),
    "F26 window ignored": (changed(RIGHT["window"], attended()), "attention_window"),
    "window where none is": (
        changed(RIGHT["attention"], attended((BEHIND < 0) | (BEHIND >= 16))),
        "attention_window",
    ),
    "soft cap": (changed(RIGHT["attention"], attended(cap=20.0)), "attention_softcap"),
    "F22 interleaved key heads": (
        changed(
            RIGHT["attention"],
            s.attention(Q, K[:, torch.arange(s.HEADS) % s.KV], V[:, torch.arange(s.HEADS) % s.KV], SCALE),
        ),
        "attention_heads",
    ),
}


@cache
def explained(name: str) -> tuple[Fit, ...]:
    return explain(FAULTS[name][0])


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_needs_no_explanation(name: str) -> None:
    case = RIGHT["window"] if name == "window" else RIGHT[name]
    if name == "window":
        case = changed(case, attended((BEHIND < 0) | (BEHIND >= 16)))
    assert explain(case) == ()


@pytest.mark.parametrize("name", FAULTS)
def test_each_kind_is_named_and_no_other(name: str) -> None:
    kind = FAULTS[name][1]
    found = explained(name)
    assert [fit.kind for fit in found] == [kind]
    fit = found[0]
    assert fit.explains and fit.share is not None and fit.share > 0.8
    assert fit.residual is not None and fit.residual < 0.5
    plain = json.loads(json.dumps(fit.to_dict()))
    assert Fit.from_dict(plain).text == fit.text
    assert kinds()[kind].result == "fit"


def only(name: str) -> Fit:
    return explained(name)[0]


def test_ratios_are_measured_and_their_place_is_listed() -> None:
    fit = only("8 of 256 rows × 1.05")
    assert fit.parameters["channels"] == list(range(40, 48))
    assert fit.parameters["ratio"] == pytest.approx(1.05, abs=2e-3)
    assert only("1 row × 1.02").parameters["ratio"] == pytest.approx(1.02, abs=2e-3)
    assert only("1 token × 1.05").parameters["tokens"] == [7]
    lost = only("half of the heads lost")
    assert (lost.parameters["ratio"], lost.parameters["heads"]) == (0.0, [4, 5, 6, 7])
    later = only("rows from token 20 on")
    assert later.parameters["tokens"] == list(range(20, 64)) and later.parameters["channels"] == list(range(40, 48))
    assert "added or reduced twice" in only("twice").text
    own = only("tokens, each its own")
    assert own.parameters["ratios"] == pytest.approx(torch.linspace(0.5, 2, 64)[own.parameters["tokens"]], rel=5e-3)


def test_numbers_are_fitted() -> None:
    assert only("F13 eps 1e-5 at rms 0.02").parameters["eps"] == 1e-5
    assert only("eps of no configuration").parameters["eps"] == pytest.approx(3e-5, rel=0.02)
    hidden = only("F24 scale of the hidden size").parameters
    assert hidden["scale"] == pytest.approx(1 / 16, rel=2e-3) and hidden["named"] == ["1/sqrt(hidden)"]
    assert only("mscale missing").parameters["ratio"] == pytest.approx(1 / 1.59, rel=2e-3)
    assert "no scale" in only("no scale").parameters["named"]
    assert only("window where none is").parameters["window"] == 16
    assert only("F26 window + 1").parameters == {"window": 17, "expected": 16, "first_position": 16}
    assert only("F20 reduced twice").parameters == {"term": "b", "times": 3.0}
    assert only("F19 one rank's part").parameters == {"rank": 1, "ranks": 4}


def test_names_are_told() -> None:
    assert only("F15 another projection").parameters["other"] == "mlp.up"
    assert only("F14 the other norm's weight").parameters["weight"] == "k_norm"
    assert only("read another input").parameters == {"input": "x", "read": "mlp_norm"}
    assert only("gelu").parameters["function"] == "gelu"
    assert only("gelu_tanh").parameters["function"] == "gelu_pytorch_tanh"
    assert only("result in fp8").parameters["dtype"] == "float8_e4m3fn"
    assert only("result in int8").parameters["per"] == "token"
    assert only("weight in int8").parameters == {"input": "weight", "to": "int8, each row"}
    assert only("two rows exchanged").parameters["from"] == [[3, 9], [9, 3]]
    assert only("stale for some rows").parameters["tokens"] == list(range(10, 20))
    assert only("the next key is seen").parameters["mask"] == {"ahead": 1}
    assert "% 2 instead of h // 4" in only("F22 interleaved key heads").text


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (RIGHT["linear"].bad.float() * 1.25, "factor"),
        (RIGHT["linear"].bad.float().roll(1, 0), "rows_moved"),
        (OTHER.bad.float() * 0.5 + RIGHT["linear"].bad.float(), "unexplained"),
    ],
)
def test_what_was_found_is_read_in_chinese(bad: Tensor, kind: str) -> None:
    (found, *_) = [one for one in explain(changed(RIGHT["linear"], bad)) if one.kind == kind]
    assert text_of(found.told) == found.text
    chinese = text_of(found.told, "zh")
    assert re.search("[\u4e00-\u9fff]", chinese) and "原文" not in chinese
