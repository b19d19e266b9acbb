"""Operators as a right kernel evaluates them in half precision, and cases of faults, at realistic sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.recompute import Exact
from align.fits import FitCase

Tensor = torch.Tensor
BF16, FP16, WIDE = torch.bfloat16, torch.float16, torch.float64
T, HIDDEN, HEADS, KV, DIM, INNER = 64, 256, 8, 2, 32, 512
THETA = 10000.0


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def weights(size: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return (1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def case(
    operator: str,
    bad: Tensor,
    exact: Exact,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Any] | None = None,
    positions: Tensor | None = None,
    **more: Any,
) -> FitCase:
    """Judged against the float64 result of its own inputs, with the bound of ``operators.tsv``."""
    dtype = str(bad.dtype).removeprefix("torch.")
    roundings = bounds()[operator].max_roundings if operator in bounds() else 2.0
    return FitCase(
        name=f"layers.0.{operator}",
        operator=operator,
        bad=bad,
        ref=exact.value,
        noise=exact.magnitude * (roundings * unit_roundoff(dtype)),
        positions=torch.arange(len(bad)) if positions is None else positions,
        dtype=dtype,
        inputs=inputs,
        parameters=parameters or {},
        **more,
    )


# ------------------------------------------------------------------------------------------------- faithful kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers has it: the normalised row is rounded before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_case(bad: Tensor | None = None, rms: float = 1.0, eps: float = 1e-6, **more: Any) -> FitCase:
    dtype = BF16 if bad is None else bad.dtype
    x, weight = normal(T, HIDDEN, scale=rms, dtype=dtype), weights(HIDDEN, 1, dtype)
    bad = rms_norm(x, weight, eps) if bad is None else bad
    exact = recompute.rms_norm(x, weight, eps, WIDE)
    return case("rms_norm", bad, exact, {"x": x, "weight": weight}, {"eps": eps, "hidden": HIDDEN}, **more)


def linear_case(seed: int = 0, dtype: torch.dtype = BF16, bias: bool = False, out: int = HIDDEN) -> FitCase:
    """``down_proj``: [T, 512] → [T, 256]."""
    x, weight = normal(T, INNER, seed=seed, dtype=dtype), normal(out, INNER, seed=seed + 1, scale=0.05, dtype=dtype)
    inputs = {"x": x, "weight": weight}
    offset = None
    if bias:
        offset = inputs["bias"] = normal(out, seed=seed + 2, dtype=dtype)
    bad = torch.nn.functional.linear(x, weight, offset)
    exact = recompute.linear(x, weight, offset, WIDE)
    return case("linear", bad, exact, inputs, {"hidden": HIDDEN, "tp": 4})


def rope(x: Tensor, angles: Tensor, factor: float = 1.0, interleaved: bool = False) -> Tensor:
    """cos and sin in float32, then in the model's dtype, as both engines keep them; ``angles`` [T, D / 2]."""
    cos, sin = ((wave * factor).to(x.dtype)[:, None] for wave in (angles.float().cos(), angles.float().sin()))
    half = x.shape[-1] // 2
    one, two = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    parts = one * cos - two * sin, two * cos + one * sin
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def rope_case(
    angles: Tensor | None = None,
    positions: Tensor | None = None,
    parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype = BF16,
    dim: int = 64,
    **form: Any,
) -> FitCase:
    """Recorded with ``angles``; expected with those of ``parameters``."""
    positions = torch.arange(T) if positions is None else positions
    parameters = {"rope_theta": THETA, **(parameters or {})}
    inverse, factor = recompute.rope_frequencies(parameters, dim, int(positions.max()) + 1)
    x = normal(len(positions), 4, dim, dtype=dtype)
    right = positions.float()[:, None] * inverse
    bad = rope(x, right if angles is None else angles, **{"factor": factor, **form})
    exact = recompute.rope(x, positions, inverse, factor, WIDE)
    return case("rope", bad, exact, {"x": x}, {"rope": parameters}, positions)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Float32 scores, probabilities rounded, as an eager kernel does; groups of neighbours share a key head."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    scores = scores.masked_fill(behind < 0 if hidden is None else hidden, -torch.inf)
    weights_ = torch.softmax(scores, -1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights_.float(), values.float()).to(q.dtype)


def qkv(seed: int = 0, length: int = T, size: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(length, HEADS, DIM, seed=seed, scale=size), normal(length, KV, DIM, seed=seed + 1, scale=size)
    return q, k, normal(length, KV, DIM, seed=seed + 2)


def attention_case(bad: Tensor | None = None, seed: int = 0, size: float = 2.0, **known: Any) -> FitCase:
    q, k, v = qkv(seed, size=size)
    scale = DIM**-0.5
    parameters = {"scale": scale, "head_dim": DIM, "hidden": HIDDEN, **known}
    window = known.get("window")
    exact = recompute.attention(q, torch.arange(T), k, v, scale, window, WIDE)
    bad = attention(q, k, v, scale) if bad is None else bad
    return case("attention", bad, exact, {"q": q, "k": k, "v": v}, parameters)


def silu_case(bad: Tensor | None = None, seed: int = 0) -> FitCase:
    gate, up = normal(T, INNER, seed=seed), normal(T, INNER, seed=seed + 1)
    bad = torch.nn.functional.silu(gate) * up if bad is None else bad
    return case("silu_mul", bad, recompute.silu_mul(gate, up, WIDE), {"gate": gate, "up": up})


def add_case(bad: Tensor | None = None) -> FitCase:
    a, b = normal(T, HIDDEN), normal(T, HIDDEN, seed=1)
    return case("add", a + b if bad is None else bad, recompute.add(a, b, WIDE), {"a": a, "b": b})


def changed(right: FitCase, bad: Tensor, **more: Any) -> FitCase:
    """The same case with another recorded result."""
    return replace(right, bad=bad.to(right.bad.dtype), **more)
