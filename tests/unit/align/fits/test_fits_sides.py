"""Against the other side's result instead of the oracle's; single rows of decode; later chunks; rarer operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from align.checkpoints import recompute
from align.fits import FitCase, explain
from align.fits.attend import attend
from tests.unit.align.fits import synthetic as s

Tensor = torch.Tensor
SCALE = s.DIM**-0.5
BEHIND = torch.arange(s.T)[:, None] - torch.arange(s.T)[None]


def between(case: FitCase, noise: float | None = None) -> FitCase:
    """Expected is what the other side recorded, in the model's dtype; both sides may err."""
    allowed = case.noise * 2 if noise is None else noise
    return replace(case, ref=case.ref.to(case.bad.dtype), against="other", noise=allowed)


def some(case: FitCase, rows: slice, bad: Tensor) -> FitCase:
    """Some rows of attention; all keys stay."""
    assert isinstance(case.noise, Tensor)
    return replace(
        case,
        bad=bad[rows],
        ref=case.ref[rows],
        noise=case.noise[rows],
        positions=case.positions[rows],
        inputs={**case.inputs, "q": case.inputs["q"][rows]},
    )


@pytest.mark.parametrize("noise", [None, 0.01])
def test_between_the_sides(noise: float | None) -> None:
    right = s.linear_case()
    assert explain(between(right, noise)) == ()
    (fit,) = explain(between(s.changed(right, right.bad * 2), noise))
    assert (fit.kind, fit.parameters["named"]) == ("factor", ["added or reduced twice"])
    bad = right.bad.clone()
    bad[:, 40:48] *= 1.1
    (fit,) = explain(between(s.changed(right, bad), noise))
    assert (fit.kind, fit.parameters["channels"]) == ("factor_channels", list(range(40, 48)))


def test_epsilon_between_the_sides_needs_the_inputs() -> None:
    right = s.norm_case(rms=0.02)
    bad = s.rms_norm(right.inputs["x"], right.inputs["weight"], 1e-5)
    (fit,) = explain(between(s.changed(right, bad)))
    assert (fit.kind, fit.parameters["eps"]) == ("eps", 1e-5)
    kinds = [fit.kind for fit in explain(between(s.changed(right, bad, inputs={}, parameters={})))]
    assert kinds and "eps" not in kinds


def test_one_row_of_decode() -> None:
    right = s.attention_case()
    q, k, v = s.qkv()
    last = slice(63, 64)
    assert explain(some(right, last, right.bad)) == ()
    (fit,) = explain(some(right, last, s.attention(q, k, v, s.HIDDEN**-0.5)))
    assert (fit.kind, fit.parameters["named"]) == ("attention_scale", ["1/sqrt(hidden)"])
    (fit,) = explain(some(right, last, s.attention(q, k, v, SCALE, (BEHIND < 0) | (BEHIND >= 20))))
    assert (fit.kind, fit.parameters["window"]) == ("attention_window", 20)


def test_a_chunk_that_does_not_see_what_came_before() -> None:
    right = s.attention_case()
    q, k, v = s.qkv()
    hidden = (BEHIND < 0) | (torch.arange(s.T)[None] < 32)
    (fit,) = explain(some(right, slice(32, 64), s.attention(q, k, v, SCALE, hidden)))
    assert (fit.kind, fit.parameters["mask"]) == ("attention_mask", {"first": 32})


def test_sinks_that_are_left_out() -> None:
    right = s.attention_case()
    q, k, v = s.qkv()
    sinks = torch.ones(s.HEADS)
    ref = attend(q, torch.arange(s.T), k, v, SCALE, s.BF16, sinks=sinks).value
    (fit,) = explain(replace(right, ref=ref, inputs={**right.inputs, "sinks": sinks}))
    assert fit.kind == "attention_sinks"


def test_silu_where_gelu_is_expected() -> None:
    gate, up = s.normal(s.T, s.INNER), s.normal(s.T, s.INNER, seed=1)
    exact = recompute.gated(gate, up, "gelu_pytorch_tanh", torch.float64)
    known = {"activation": "gelu_pytorch_tanh"}
    right = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert explain(s.case("gelu_mul", right, exact, {"gate": gate, "up": up}, known)) == ()
    bad = torch.nn.functional.silu(gate) * up
    (fit,) = explain(s.case("gelu_mul", bad, exact, {"gate": gate, "up": up}, known))
    assert (fit.kind, fit.parameters["function"]) == ("activation", "silu")


def test_an_operator_that_is_not_known_has_the_general_fits() -> None:
    right = s.linear_case()
    strange = replace(right, operator="shared_experts", inputs={})
    assert explain(strange) == ()
    (fit,) = explain(s.changed(strange, right.bad.flip(0)))
    assert fit.kind == "rows_moved"


def test_rows_of_another_request_are_named() -> None:
    right = s.linear_case()
    bad = right.bad.clone()
    bad[40:48] = right.bad[0:8]
    requests = ("r0",) * 32 + ("r1",) * 32
    (fit,) = explain(s.changed(right, bad, requests=requests))
    assert fit.kind == "rows_moved" and fit.parameters["requests"] == [["r1", "r0"]]
    assert "r1 has rows of r0" in fit.text
