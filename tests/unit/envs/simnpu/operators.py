"""ATen operators that the engines use, as functions of random inputs, for a comparison of npu and CPU.

Every row is ``name: (function, inputs)``; an input is ``"dtype shape"`` such as ``"f 3x4"`` (see :data:`DTYPES`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor

DTYPES = {
    "f": torch.float32,
    "h": torch.float16,
    "b": torch.bfloat16,
    "d": torch.float64,
    "i": torch.int32,
    "l": torch.int64,
    "?": torch.bool,
}


def make(text: str, seed: int) -> Tensor:
    """A random tensor. Integers lie in 0 … 2, so that they index any dimension of three and more."""
    kind, _, shape = text.partition(" ")
    size = [int(n) for n in shape.split("x") if n]
    generator = torch.Generator().manual_seed(seed)
    if kind in "il?":
        return torch.randint(0, 2 if kind == "?" else 3, size, generator=generator).to(DTYPES[kind])
    return torch.randn(size, generator=generator).to(DTYPES[kind])


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    x[1:].mul_(y[1:]).add_(1)
    return x.t().clamp_(-1, 1)


def _assign(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    x[at] = values
    x[0, 1] = 9
    x[:, -1] = values[0, -1]
    return x


def _accumulate(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    return x.index_put_((at,), values, accumulate=True)


OPERATORS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "add": (lambda x, y: x + y, ["b 3x4", "b 4"]),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=3), ["f 3x4", "f 3x1"]),
    "promotion": (lambda x, y: x * y, ["i 3x4", "h 4"]),
    "scalars": (lambda x: ((x + 1) * 2.5 - 3, 2 - x, 1.5 / (x + 2), x**2), ["b 7"]),
    "integer scalars": (lambda x: (x % 2, x // 2, x * 1.5, x / 2, 5 - x, x == 1, x << 1), ["l 3x4"]),
    "comparisons": (lambda x, y: (x > y, x <= 0, (x != y) & (x < 1)), ["f 3x4", "f 3x4"]),
    "in place through views": (_in_place, ["f 4x4", "f 4x4"]),
    "assign by index": (_assign, ["f 4x3", "l 2", "f 2x3"]),
    "accumulate by index": (_accumulate, ["f 4x3", "l 5", "f 5x3"]),
    "index": (lambda x, at: (x[at], x[:, at], x[at, at], x[None, ..., 1]), ["h 4x3x3", "l 6"]),
    "boolean index": (lambda x, mask: (x[mask], x.masked_fill(mask, 0)), ["b 4x3", "? 4x3"]),
    "index_select": (lambda x, at: x.index_select(1, at), ["f 2x5", "l 4"]),
    "index_copy_": (lambda x, y: x.index_copy_(0, torch.tensor([3, 0], device=x.device), y), ["f 4x3", "f 2x3"]),
    "gather and scatter": (lambda x, at: (x.gather(1, at), x.scatter(1, at, 7.0)), ["f 2x5", "l 2x3"]),
    "embedding": (lambda at, w: functional.embedding(at, w), ["i 5", "b 8x6"]),
    "linear": (lambda x, w, b: functional.linear(x, w, b), ["f 5x8", "f 3x8", "f 3"]),
    "half matmul": (lambda x, y: (x @ y, x[0] @ y, torch.addmm(y[:5, :5], x, y[:, :5])), ["b 5x8", "b 8x6"]),
    "bmm": (lambda x, y: torch.bmm(x, y), ["f 2x3x4", "f 2x4x5"]),
    "einsum": (lambda x, y: torch.einsum("bhd,bkd->bhk", x, y), ["f 2x3x4", "f 2x5x4"]),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0)), ["b 4x9"]),
    "norms": (lambda x, w: (functional.layer_norm(x, (6,), w), functional.rms_norm(x, (6,), w)), ["f 3x6", "f 6"]),
    "activations": (
        lambda x: (functional.silu(x), functional.gelu(x), x.sigmoid(), x.tanh(), functional.relu(x)),
        ["h 3x5"],
    ),
    "unary": (lambda x: (x.exp(), x.abs().sqrt(), x.cos(), x.sin(), -x, x.rsqrt(), x.floor(), x.pow(2)), ["f 6"]),
    "reductions": (lambda x: (x.sum(), x.mean(-1), x.amax(0), x.var(1), x.std(), x.norm(dim=1)), ["f 4x5"]),
    "integer reductions": (lambda x: (x.sum(), x.cumsum(0), x.prod(), x.any(), x.all(1), x.max()), ["i 4x5"]),
    "max and min": (lambda x: (x.max(1), x.min(0), x.argmax(-1), x.argmin()), ["b 4x5"]),
    "topk": (lambda x: x.topk(3, -1), ["f 4x9"]),
    "sort": (lambda x: (x.sort(stable=True, dim=-1), x.argsort(0, descending=True)), ["f 4x9"]),
    "unique": (lambda x: (torch.unique(x), torch.bincount(x)), ["l 20"]),
    "nonzero": (lambda x: (x.nonzero(), torch.where(x), torch.count_nonzero(x)), ["? 4x5"]),
    "where": (lambda c, x, y: (torch.where(c, x, y), torch.where(c, x, 0.0)), ["? 3x4", "f 3x4", "f 4"]),
    "cat and stack": (
        lambda x, y: (torch.cat([x, y], 1), torch.stack([x, x]), torch.hstack([x, y])),
        ["h 3x4", "h 3x2"],
    ),
    "split and chunk": (lambda x: (x.split([1, 3], 1), x.chunk(2, 0), x.unbind(1), x.tensor_split(3)), ["h 4x4"]),
    "shapes": (
        lambda x: (x.t(), x.permute(1, 0), x.reshape(2, 6), x.flatten(), x.unsqueeze(1).squeeze(1), x[:, ::2], x.T),
        ["i 3x4"],
    ),
    "expand and repeat": (
        lambda x: (x.expand(2, 3, 4) + 0, x.repeat(2, 2), x.repeat_interleave(2, 0), x.tile(3)),
        ["f 3x4"],
    ),
    "roll, flip, pad": (lambda x: (x.roll(1, 1), x.flip(0), functional.pad(x, (1, 2), value=-1.0)), ["f 3x4"]),
    "triangles": (lambda x: (x.tril(), x.triu(1), x.diagonal(), torch.diag(x[0])), ["f 4x4"]),
    "casts": (lambda x: (x.to(torch.int32), x.half(), x.bool(), x.double(), x.to(torch.bfloat16)), ["f 3x4"]),
    "factories": (
        lambda x: (
            torch.arange(2, 9, 2, device=x.device),
            torch.arange(0.0, 1.0, 0.25, device=x.device),
            torch.zeros_like(x),
            torch.full((2, 2), 7, device=x.device),
            torch.eye(3, device=x.device),
            torch.linspace(0, 1, 5, device=x.device),
            x.new_ones(2),
            x.new_tensor([1, 2]),
            torch.tril_indices(3, 3, device=x.device),
            torch.ones(2, dtype=torch.bool, device=x.device),
        ),
        ["h 2"],
    ),
    "clamp and lerp": (lambda x, y: (x.clamp(min=0), x.clip(-0.5, 0.5), x.lerp(y, 0.3), x.maximum(y)), ["f 6", "f 6"]),
    "logical": (lambda x, y: (x & y, x | ~y, x ^ y, x.logical_not(), x.int().bitwise_and(1)), ["? 6", "? 6"]),
    "attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        ["f 1x2x5x8", "f 1x2x5x8", "f 1x2x5x8"],
    ),
    "searchsorted": (
        lambda x, y: (torch.searchsorted(x.sort()[0], y), torch.bucketize(y, x.sort()[0])),
        ["f 9", "f 5"],
    ),
    "one_hot": (lambda x: functional.one_hot(x, 4), ["l 5"]),
    "convolution": (lambda x, w: functional.conv1d(x, w, padding=1), ["f 1x2x7", "f 3x2x3"]),
    "interpolation": (lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"), ["f 1x2x3x3"]),
    "complex": (lambda x: (torch.polar(x.abs(), x).real, torch.view_as_complex(x.view(3, 2)) * 2j), ["f 6"]),
    "equal": (lambda x, y: (torch.equal(x, y), torch.allclose(x, x + 0), bool((x == x).all())), ["f 4", "f 4"]),
    "cross_entropy": (lambda x, at: functional.cross_entropy(x, at), ["f 5x7", "l 5"]),
    "empty": (lambda x: (x + 1, x.sum(), torch.cat([x, x]), x.reshape(3, 0), x @ x.t()), ["f 0x3"]),
    "zero-dimensional": (lambda x, y: (x * 2, x + y, y * x, x.view(1, 1), x.item(), int(x > 0)), ["d ", "f 3"]),
}

#: One kernel on the CPU, several operators on the device: equal up to rounding only.
DECOMPOSED = ("norms", "attention")
