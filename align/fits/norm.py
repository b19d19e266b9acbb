"""RMSNorm: another epsilon, another weight formula, another mean."""

from __future__ import annotations

from collections.abc import Iterator
from math import log10

import torch

from align.checkpoints.recompute import Exact
from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.fits.operators import evaluate, proposal
from align.fits.search import minimise
from align.sentences import Said, said

Tensor = torch.Tensor
#: Epsilons of published configurations, and none at all.
EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7, 0.0)
#: Larger ones are no epsilons: they only imitate a factor.
_LARGEST = 2e-3


def propose(measured: Measured) -> Iterator[Proposal]:
    """What the norm gives with each change, and with the epsilon that fits best."""
    case = measured.case
    eps = case.number("eps")
    if not case.has("x", "weight") or eps is None:
        return
    x, weight = case.inputs["x"].to(torch.float64), case.inputs["weight"].to(torch.float64)
    exact = evaluate(case, {"x": x, "weight": weight})
    assert exact is not None
    floor = exact.magnitude - exact.value.abs()
    for known in EPSILONS:
        if known != eps:
            text = said("fit.eps", eps=known, expected=eps)
            yield _value(measured, "eps", _norm(x, known) * weight, floor, text, {"eps": known, "expected": eps}, 0)
    fitted = _fit(measured, x, weight, eps)
    if fitted is not None:
        text = said("fit.eps", eps=fitted, expected=eps)
        yield _value(measured, "eps", _norm(x, fitted) * weight, floor, text, {"eps": fitted, "expected": eps}, 1)
    yield from _variants(measured, x, weight, eps, floor)


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _fit(measured: Measured, x: Tensor, weight: Tensor, eps: float) -> float | None:
    """The epsilon that fits best: least squares over its logarithm."""
    mean = float(x.square().mean())
    if mean <= 0:
        return None
    inverse = measured.bound.reciprocal()

    def cost(exponent: float) -> float:
        value = measured.whole(_norm(x, 10.0**exponent) * weight)
        return float(((measured.bad - value) * inverse).square().sum())

    top = log10(_LARGEST)
    low = min(log10(mean) - 5, log10(eps) - 1 if eps > 0 else -9.0, top - 1)
    grid = [low + (top - low) * step / 32 for step in range(33)]
    exponent, best = minimise(cost, grid)
    return 10.0**exponent if best < cost(log10(eps) if eps > 0 else -30.0) else None


def _variants(measured: Measured, x: Tensor, weight: Tensor, eps: float, floor: Tensor) -> Iterator[Proposal]:
    normal = _norm(x, eps)
    root = x.square().mean(-1, keepdim=True).sqrt()
    centred = x - x.mean(-1, keepdim=True)
    flat = x.reshape(x.shape[0], -1)
    together = x * torch.rsqrt(flat.square().mean(-1) + eps).reshape(-1, *[1] * (x.dim() - 1))
    variants = {
        "weight left out: x / rms": (normal, "norm_weight"),
        "1 + weight instead of weight": (normal * (1 + weight), "norm_weight"),
        "weight - 1 instead of weight": (normal * (weight - 1), "norm_weight"),
        "weight applied twice": (normal * weight * weight, "norm_weight"),
        "the mean subtracted as in LayerNorm": (_norm(centred, eps) * weight, "norm_formula"),
        "not divided by the root mean square": (x * weight, "norm_formula"),
        "eps added behind the root": (x / (root + eps) * weight, "norm_formula"),
        "divided by the norm instead of the root mean square": (normal / x.shape[-1] ** 0.5 * weight, "norm_formula"),
        "divided by the mean square": (x / (root**2 + eps) * weight, "norm_formula"),
    }
    if x.dim() == 3:
        variants["one root mean square for all heads of a token"] = (together * weight, "norm_formula")
    for words, (value, kind) in variants.items():
        yield _value(measured, kind, value, floor, said("fit.norm", formula=words), {"formula": words}, 0)
    heads = measured.case.number("tp")
    if heads and heads > 1 and x.dim() == 2 and x.shape[1] % int(heads) == 0:
        parts = x.reshape(x.shape[0], int(heads), -1)
        value = _norm(parts, eps).reshape(x.shape) * weight
        words = "a root mean square of each rank's part"
        yield _value(measured, "norm_formula", value, floor, said("fit.norm", formula=words), {"formula": words}, 0)


def _value(
    measured: Measured, kind: str, value: Tensor, floor: Tensor, text: Said, parameters: dict[str, object], free: int
) -> Proposal:
    """All roundings of a norm are relative to its value."""
    return proposal(measured, kind, Exact(value, value.abs() + floor), text, parameters, free)
