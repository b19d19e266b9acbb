"""Float64 references, error bounds and small helpers of the operator tests.

A reference is written plainly, token by token, and shares nothing with the operators. A bound follows from
the number of roundings: `roundings` times the unit roundoff of the tensor's dtype, plus an accumulation of
`terms` terms in float32, both relative to the sum of the absolute values of what is added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Tensor = torch.Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
EPS32 = 2.0**-24


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to the nearest number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same ones for a seed, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(
    actual: Tensor,
    reference: Tensor,
    rounded: Tensor,
    roundings: float,
    terms: int,
    summed: Tensor | None = None,
) -> None:
    """Compare with a float64 reference.

    `rounded` is what the `roundings` to the tensor's dtype are relative to, `summed` (the same unless given)
    what the float32 accumulation of `terms` terms is relative to.
    """
    assert reference.dtype == torch.float64
    assert actual.shape == reference.shape
    spread = rounded if summed is None else summed
    bound = rounded.abs() * roundings * unit(actual.dtype) * 1.01 + spread.abs() * terms * EPS32
    _within(actual, reference, bound)


def _within(actual: Tensor, reference: Tensor, bound: Tensor) -> None:
    limits = torch.finfo(actual.dtype)
    error = (actual.double() - reference).abs()
    excess = error - bound - limits.smallest_normal * limits.eps
    worst = excess.max().item() if error.numel() else 0.0
    assert worst <= 0, f"off by {error.max().item():.3e}, beyond its bound by {worst:.3e}"


def refusal(name: str, function: Callable[..., Any], given: dict[str, Any], words: str) -> str:
    """Check that a call raises RuntimeError itself, naming the operator, with `words` in it."""
    with pytest.raises(RuntimeError) as caught:
        function(**given)
    assert type(caught.value) is RuntimeError
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert words in message
    return message


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    allowed: Callable[[int, int], bool],
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of one sequence in float64, one query and head at a time.

    query [T, N, D], key and value [S, KV, D]. Returns (output, sum of weight * |value|, log-sum-exp [T, N],
    largest |score| sum [T, N]); queries that may look nowhere give zeros and +inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    tokens, heads, _ = query.shape
    group = heads // key.shape[1]
    output = torch.zeros(tokens, heads, value.shape[2], dtype=torch.float64)
    spread = torch.zeros_like(output)
    total = torch.full((tokens, heads), torch.inf, dtype=torch.float64)
    largest = torch.zeros(tokens, heads, dtype=torch.float64)
    for token in range(tokens):
        seen = [at for at in range(key.shape[0]) if allowed(token, at)]
        for head in range(heads):
            rows = key[seen, head // group]
            if not seen:
                continue
            scores = (rows * query[token, head]).sum(-1) * scale
            largest[token, head] = ((rows * query[token, head]).abs().sum(-1) * abs(scale)).max()
            every = scores if sink is None else torch.cat((scores, sink[head : head + 1].double()))
            peak = every.max()
            total[token, head] = peak + (every - peak).exp().sum().log()
            weights = (scores - total[token, head]).exp()
            output[token, head] = (weights[:, None] * value[seen, head // group]).sum(0)
            spread[token, head] = (weights[:, None] * value[seen, head // group].abs()).sum(0)
    return output, spread, total, largest


def assert_attention_close(
    actual: Tensor, reference: tuple[Tensor, Tensor, Tensor, Tensor], numerics: str, span: int, width: int
) -> None:
    """Compare an attention output with `attention`, for `span` keys of `width` numbers each.

    An error of the scores moves every weight by at most twice as much, relatively; natively the scores are
    rounded twice and the weights once. The output is rounded once, natively twice.
    """
    output, spread, _, largest = reference
    step = unit(actual.dtype)
    native = numerics == "native"
    score_error = largest * ((2 * step if native else 0.0) + (width + 4) * EPS32)
    weight_error = torch.expm1(2 * score_error) + (step if native else 0.0) + (span + 16) * EPS32
    weights = weight_error[..., None] + span * EPS32 + (step if native else 0.0)
    assert actual.shape == output.shape
    _within(actual, output, spread * weights + output.abs() * step * 1.01)
