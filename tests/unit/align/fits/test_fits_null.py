"""The null hypothesis: for rounding alone nothing is returned, whatever the kernel, the dtype and the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.checkpoints import recompute
from align.fits import FitCase, explain
from align.fits.measured import Measured
from tests.unit.align.fits import synthetic as s

Tensor = torch.Tensor
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.bfloat16, torch.float16])
sizes = st.sampled_from([(1, 8), (3, 64), (17, 96), (64, 256)])
few = settings(max_examples=30, deadline=None)


def rows(seed: int, shape: tuple[int, ...], scale: float, dtype: torch.dtype, repeated: bool) -> Tensor:
    """Rows of one scale; ``repeated``: all equal but the last, so that they are rounded alike."""
    x = s.normal(*shape, seed=seed, scale=scale, dtype=dtype)
    if repeated:
        x[:-1] = x[0].clone()
    return x


@few
@given(seeds, dtypes, sizes, st.sampled_from([0.01, 1.0, 30.0]), st.booleans(), st.booleans())
def test_norms(seed: int, dtype: torch.dtype, size: tuple[int, int], scale: float, repeated: bool, fused: bool) -> None:
    x, weight = rows(seed, size, scale, dtype, repeated), s.weights(size[1], seed % 1000, dtype)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    bad = (wide * weight.float()).to(dtype) if fused else s.rms_norm(x, weight, 1e-6)
    exact = recompute.rms_norm(x, weight, 1e-6, torch.float64)
    assert explain(s.case("rms_norm", bad, exact, {"x": x, "weight": weight}, {"eps": 1e-6})) == ()


@few
@given(seeds, dtypes, sizes, st.booleans(), st.booleans())
def test_projections(seed: int, dtype: torch.dtype, size: tuple[int, int], repeated: bool, biased: bool) -> None:
    x = rows(seed, size, 1.0, dtype, repeated)
    weight = s.normal(96, size[1], seed=seed + 1, scale=0.1, dtype=dtype)
    bias = s.normal(96, seed=seed + 2, dtype=dtype) if biased else None
    bad = torch.nn.functional.linear(x, weight, bias)
    inputs = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    assert explain(s.case("linear", bad, recompute.linear(x, weight, bias, torch.float64), inputs)) == ()


@few
@given(seeds, dtypes, st.sampled_from([0, 100, 5000]), st.integers(1, 40))
def test_rope(seed: int, dtype: torch.dtype, start: int, count: int) -> None:
    positions = torch.arange(start, start + count)
    case = s.rope_case(positions=positions, dtype=dtype)
    assert explain(case) == ()
    x = s.normal(count, 4, 64, seed=seed, dtype=dtype)
    inverse, _ = recompute.rope_frequencies(case.parameters["rope"], 64)
    bad = s.rope(x, positions.float()[:, None] * inverse)
    exact = recompute.rope(x, positions, inverse, 1.0, torch.float64)
    assert explain(s.case("rope", bad, exact, {"x": x}, case.parameters, positions)) == ()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.5, 2.0, 4.0]))
def test_attention(seed: int, size: float) -> None:
    q, k, v = s.qkv(seed, size=size)
    exact = recompute.attention(q, torch.arange(s.T), k, v, s.DIM**-0.5, None, torch.float64)
    bad = s.attention(q, k, v, s.DIM**-0.5)
    parameters = {"scale": s.DIM**-0.5, "head_dim": s.DIM}
    assert explain(s.case("attention", bad, exact, {"q": q, "k": k, "v": v}, parameters)) == ()


@few
@given(seeds, dtypes, sizes, st.sampled_from([0.1, 1.0, 8.0]))
def test_activations_and_sums(seed: int, dtype: torch.dtype, size: tuple[int, int], scale: float) -> None:
    one, two = s.normal(*size, seed=seed, scale=scale, dtype=dtype), s.normal(*size, seed=seed + 1, dtype=dtype)
    act = torch.nn.functional.silu(one) * two
    exact = recompute.silu_mul(one, two, torch.float64)
    assert explain(s.case("silu_mul", act, exact, {"gate": one, "up": two})) == ()
    exact = recompute.add(one, two, torch.float64)
    assert explain(s.case("add", one + two, exact, {"a": one, "b": two})) == ()


@few
@given(seeds, sizes)
def test_two_right_sides(seed: int, size: tuple[int, int]) -> None:
    """N2: a fused and an unfused norm, one against the other; ``noise`` as one number."""
    x, weight = s.normal(*size, seed=seed), s.weights(size[1], seed % 1000)
    fused = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(s.BF16)
    case = FitCase(
        "layers.0.attn_norm",
        "rms_norm",
        s.rms_norm(x, weight, 1e-6),
        fused,
        8 * 2.0**-8,
        torch.arange(size[0]),
        "bfloat16",
        against="other",
    )
    assert explain(case) == ()


@few
@given(st.permutations(list(range(16))))
def test_another_order_of_a_batch(order: list[int]) -> None:
    """N4: rows that are paired again after another order of the batch."""
    case = s.linear_case()
    bad = torch.nn.functional.linear(case.inputs["x"][order], case.inputs["weight"])
    back = torch.empty_like(bad)
    back[order] = bad
    fewer = replace(
        case,
        bad=back,
        ref=case.ref[:16],
        noise=case.noise[:16],  # type: ignore[index]
        positions=torch.arange(16),
        inputs={},
    )
    assert explain(fewer) == ()


@pytest.mark.parametrize("times", [1.5, 8.0, 40.0])
def test_random_errors_are_not_explained(times: float) -> None:
    """An error without structure has no kind, small or large."""
    case = s.linear_case()
    assert isinstance(case.noise, Tensor)
    noise = (torch.rand(case.bad.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1) * case.noise * times
    found = explain(
        s.changed(case, case.ref + noise, others={"up": s.linear_case(5).ref}, previous=s.linear_case(9).bad)
    )
    assert [fit.explains for fit in found] == [False] * len(found)
    assert found[-1].kind == "unexplained"


def test_a_single_wrong_element_is_not_explained_but_found() -> None:
    case = s.linear_case()
    bad = case.bad.clone()
    bad[5, 7] = 9.0
    (fit,) = explain(s.changed(case, bad))
    assert (fit.kind, fit.explains) == ("unexplained", False)
    assert (fit.parameters["tokens"], fit.parameters["channels"]) == ([5], [7])


def test_what_is_not_finite_on_both_sides_is_left_out() -> None:
    case = s.linear_case()
    bad, ref = case.bad.clone(), case.ref.clone()
    bad[3, 4] = torch.nan
    ref[3, 4] = torch.inf
    broken = replace(case, bad=bad, ref=ref)
    assert explain(broken) == ()
    (fit,) = explain(replace(broken, bad=bad * 2))
    assert fit.kind == "factor" and not bool(Measured(broken).finite[3, 0, 4])
