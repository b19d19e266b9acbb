"""Right kernels of two kinds, written from the formulas of transformers' eager code: what a judge must be silent on.

``native``: every intermediate in the tensors' dtype. ``internal``: float32 inside, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
DTYPES = (torch.bfloat16, torch.float16)


def norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LlamaRMSNorm."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_internal(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(weight.dtype)


def norm_rounded_scale(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """1/rms in the tensors' dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)
    return weight * (x * scale)


def norm_of_sum(a: Tensor, b: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A fused add-norm: the sum is normalised before it is rounded."""
    return norm_internal(a.float() + b.float(), weight, eps)


def halves_turned(x: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat((-two, one), dim=-1)


def cos_sin(positions: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * inverse[None]
    wide = torch.cat((angles, angles), dim=-1)[:, None]
    return wide.cos().to(dtype), wide.sin().to(dtype)


def rope_native(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    cos, sin = cos_sin(positions, inverse, x.dtype)
    return x * cos + halves_turned(x) * sin


def rope_internal(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    cos, sin = cos_sin(positions, inverse, x.dtype)
    return (x.float() * cos.float() + halves_turned(x.float()) * sin.float()).to(x.dtype)


def rope_exact_cos(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """cos and sin in float32."""
    cos, sin = cos_sin(positions, inverse, torch.float32)
    return (x.float() * cos + halves_turned(x.float()) * sin).to(x.dtype)


def _scores(query: Tensor, positions: Tensor, keys: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // keys.shape[1]
    each = keys.transpose(0, 1).repeat_interleave(groups, dim=0)
    scores = torch.matmul(query.transpose(0, 1), each.transpose(1, 2)) * scale
    behind = positions[:, None] - torch.arange(len(keys))[None]
    hidden = (behind < 0) | (behind >= (window or 1 << 30))
    return scores, hidden


def attention_native(
    query: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """eager_attention_forward: scores, probabilities and output in the tensors' dtype."""
    scores, hidden = _scores(query, positions, keys, scale, window)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1, dtype=torch.float32).to(query.dtype)
    groups = query.shape[1] // keys.shape[1]
    return torch.matmul(weights, values.transpose(0, 1).repeat_interleave(groups, dim=0)).transpose(0, 1)


def attention_internal(
    query: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    return attention_native(query.double(), positions, keys.double(), values.double(), scale, window).to(query.dtype)


def attention_flash(
    query: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """exp(s - max) rounded before the product with the values, divided by the sum of what was not rounded."""
    scores, hidden = _scores(query.float(), positions, keys.float(), scale, window)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    groups = query.shape[1] // keys.shape[1]
    each = values.float().transpose(0, 1).repeat_interleave(groups, dim=0)
    output = torch.matmul(weights.to(query.dtype).float(), each) / weights.sum(-1, keepdim=True)
    return output.transpose(0, 1).to(query.dtype)


def silu_native(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def silu_internal(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate.double()) * up.double()).to(gate.dtype)


def silu_rounded_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def gelu_tanh_native(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gelu_tanh_internal(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.double()
    inner = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    value: Tensor = 0.5 * wide * (1 + inner.tanh()) * up.double()
    return value.to(gate.dtype)


def linear_internal(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


def linear_float(x: Tensor, weight: Tensor) -> Tensor:
    """Float32 sums in sequence, the order with the largest error."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        total += x[:, k : k + 1].float() * weight[:, k].float()
    return total.to(x.dtype)


def linear_split(x: Tensor, weight: Tensor) -> Tensor:
    """Four partial sums, rounded, then added in float32."""
    parts = zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)
    return torch.stack([(a.double() @ b.double().T).to(x.dtype).float() for a, b in parts]).sum(0).to(x.dtype)


NORMS: tuple[Callable[[Tensor, Tensor, float], Tensor], ...] = (norm_native, norm_internal, norm_rounded_scale)
ROPES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (rope_native, rope_internal, rope_exact_cos)
ATTENTIONS: tuple[Callable[..., Tensor], ...] = (attention_native, attention_internal, attention_flash)
SILUS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (silu_native, silu_internal, silu_rounded_sigmoid)
LINEARS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (linear_internal, linear_float, linear_split)
