"""The gated activation: another function, another order of arguments, a factor left out, a limit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from align.checkpoints.recompute import Exact
from align.fits.fit import Proposal
from align.fits.functions import FUNCTIONS, gated
from align.fits.measured import Measured
from align.fits.operators import proposal
from align.sentences import said

Tensor = torch.Tensor
#: Limits of published configurations that clamp gate and up.
LIMITS = (7.0, 10.0, 20.0)


def propose(measured: Measured) -> Iterator[Proposal]:
    """What each change gives."""
    case = measured.case
    expected = str(case.parameters.get("activation") or ("gelu" if case.operator == "gelu_mul" else "silu"))
    function = FUNCTIONS.get(expected)
    if not case.has("gate", "up") or function is None:
        return
    dtype = getattr(torch, case.dtype)
    gate, up = case.inputs["gate"].to(torch.float64), case.inputs["up"].to(torch.float64)
    one = torch.ones_like(gate)

    def of(kind: str, exact: Exact, formula: str, name: str = expected, why: str = "") -> Proposal:
        parameters = {"formula": formula, "function": name, "expected": expected}
        text = said("fit.activation", formula=formula)
        if why:
            text = said("fit.activation_why", formula=formula, why=why)
        return proposal(measured, kind, exact, text, parameters)

    yield of(
        "arguments_exchanged", gated(function(up), gate, dtype), f"{expected}(up) × gate", why="gate and up exchanged"
    )
    yield of("up_missing", gated(function(gate), one, dtype), f"{expected}(gate)", why="the product with up is missing")
    yield of("up_missing", gated(function(up), one, dtype), f"{expected}(up)", why="the product with gate is missing")
    yield of("activation", gated(function(gate * up), one, dtype), f"{expected}(gate × up)")
    for name, other in FUNCTIONS.items():
        if other is not function:
            yield of("activation", gated(other(gate), up, dtype), f"{name}(gate) × up", name)
            yield of("activation", gated(other(up), gate, dtype), f"{name}(up) × gate", name)
    for limit in LIMITS:
        if float(torch.maximum(gate.max(), up.abs().max())) > limit:
            exact = gated(function(gate.clamp_max(limit)), up.clamp(-limit, limit), dtype)
            yield of("activation", exact, f"{expected}(gate) × up with both limited to {limit:g}", f"limit {limit:g}")
