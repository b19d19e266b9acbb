"""Activations between the products of an MLP: ``activation(gate) × up``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute.exact import SINGLE, Exact, Tensor, tiny


class Activation(NamedTuple):
    """A function of the gate and its slope."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _gelu_slope(x: Tensor) -> Tensor:
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    return (1 + torch.erf(x / math.sqrt(2))) / 2 + x * density


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _quick_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * x)
    return gate * (1 + 1.702 * x * (1 - gate))


_SILU = Activation(torch.nn.functional.silu, _silu_slope)
_GELU = Activation(torch.nn.functional.gelu, _gelu_slope)
_GELU_TANH = Activation(_gelu_tanh, _gelu_slope)  # a slope need not be exact: it only weighs roundings
_QUICK = Activation(lambda x: x * torch.sigmoid(1.702 * x), _quick_slope)
_RELU = Activation(torch.relu, lambda x: (x > 0).to(x.dtype))
#: Names of ``hidden_act`` in configurations, as transformers' ``ACT2FN`` reads them.
ACTIVATIONS = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "quick_gelu": _QUICK,
    "relu": _RELU,
}
#: Written as separate operations, each of which rounds to the model's dtype.
_STEPWISE = ("gelu_new", "gelu_fast")


def activation_of(name: str) -> Activation:
    """The function that a configuration names.

    Raises:
        ValueError: none that is recomputed.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is not recomputed; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def silu_mul(gate: Tensor, up: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``gate × sigmoid(gate) × up``. Products alone, so every rounding is relative: ``|y|``.

    But for strongly negative gates: there the sigmoid falls below ``tiny`` of the dtype, or ``exp(-gate)`` overflows
    float32 (below -88). What is lost is at most ``32 × tiny × |up|`` in units of ``u``, because the sigmoid falls
    faster than the gate grows.
    """
    wide, other = gate.to(compute), up.to(compute)
    value = torch.nn.functional.silu(wide) * other
    lost = 32 * max(tiny(gate.dtype), tiny(torch.float32) / unit_roundoff(gate.dtype))
    return Exact(value, value.abs().add_(other.abs(), alpha=lost).add_(tiny(gate.dtype)))


def gated(gate: Tensor, up: Tensor, activation: str, compute: torch.dtype = torch.float32) -> Exact:
    """``activation(gate) × up``, all of one shape; ``activation`` is a key of :data:`ACTIVATIONS`.

    The activation and the product round relative to the result ``y``. Beyond that:

    * GELU multiplies with ``1 + erf`` or ``1 + tanh``, which cancels for negative gates. Kernels compute it in float32:
      four roundings of ``2^-24`` relative to ``|gate × up|``.
    * ``gelu_new`` and ``gelu_fast`` are sequences of operations in the model's dtype: the argument z of tanh errs by up
      to 4 u of itself, which moves tanh by up to ``4 × 0.45 u`` (``z (1 - tanh² z)`` is at most 0.45); tanh and ``1 +
      tanh`` round too. With the factor 1/2 all that is below ``3 u |gate × up|``.
    * ``quick_gelu`` may round ``z = 1.702 gate``, which moves the sigmoid by ``u (1 - sigmoid) |z|`` of itself.

    Raises:
        ValueError: an activation that is not recomputed.
    """
    function = activation_of(activation)
    if function is _SILU:
        return silu_mul(gate, up, compute)
    wide, other = gate.to(compute), up.to(compute)
    value = function.value(wide) * other
    magnitude = value.abs()
    if function in (_GELU, _GELU_TANH):
        whole = 1.0 if activation in _STEPWISE else 4 * SINGLE / unit_roundoff(gate.dtype)
        magnitude = magnitude.add_((wide * other).abs_(), alpha=whole)
    elif function is _QUICK:
        scaled = 1.702 * wide
        magnitude = magnitude.mul_(1 + torch.sigmoid(-scaled) * scaled.abs())
    return Exact(value, magnitude.add_(_vanished(other, gate.dtype)))


def _vanished(other: Tensor, dtype: torch.dtype) -> Tensor:
    """What is lost where a factor falls below the smallest normal number, as in :func:`silu_mul`."""
    return other.abs() * (32 * max(tiny(dtype), tiny(torch.float32) / unit_roundoff(dtype))) + tiny(dtype)
