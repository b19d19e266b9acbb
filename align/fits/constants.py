"""Numbers that a factor may be: what a model or a kernel multiplies by, or forgets to."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, log2, sqrt
from typing import Any

from align.sentences import Said, said

#: The name of the factor 0.
NEVER = "never computed, or overwritten"
#: Parameters that are factors themselves, under the names of transformers' configurations.
_FACTORS = (
    "routed_scaling_factor",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "attention_factor",
    "scale",
)


def constants(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Name → value, of a model with these parameters (see :class:`FitCase`)."""
    found = {NEVER: 0.0, "added or reduced twice": 2.0, "a half": 0.5, "the sign": -1.0}

    def both(name: str, value: float) -> None:
        if value > 0 and value != 1:
            found[name] = value
            found[f"1/{name}"] = 1 / value

    both("log2(e)", log2(2.718281828459045))
    both("sqrt(2)", sqrt(2))
    for size in ("head_dim", "hidden"):
        if parameters.get(size):
            both(f"sqrt({size})", sqrt(float(parameters[size])))
            both(size, float(parameters[size]))
    if parameters.get("layers"):
        both("sqrt(2 × layers)", sqrt(2 * float(parameters["layers"])))
    for size in ("tp", "dp", "ep"):
        if parameters.get(size):
            both(f"the {size} size", float(parameters[size]))
    for name in _FACTORS:
        if parameters.get(name):
            both(name, float(parameters[name]))
    rope = parameters.get("rope") or {}
    if rope.get("factor"):
        stretch = float(rope["factor"])
        both("the rope factor", stretch)
        if stretch > 1:
            both("mscale", 0.1 * log(stretch) + 1)
            both("mscale²", (0.1 * log(stretch) + 1) ** 2)
    return found


def named(value: float, parameters: Mapping[str, Any], tolerance: float) -> list[str]:
    """Names of the constants that a fitted ``value`` may be, nearest first; ``tolerance`` is relative."""
    near = [(abs(value - constant) / (abs(constant) or 1.0), name) for name, constant in constants(parameters).items()]
    return [name for distance, name in sorted(near) if distance <= tolerance]


def or_named(value: float, names: list[str]) -> Said:
    """``0.125 (1/sqrt(head_dim))``."""
    return said("fit.named", value=value, names=names[:3]) if names else said("fit.number", value=value)
