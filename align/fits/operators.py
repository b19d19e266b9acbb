"""A case's operator computed again in float64 with something changed, and what rounding may add to that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from align.checkpoints import recompute
from align.checkpoints.recompute import Exact
from align.fits.attend import attend
from align.fits.case import FitCase
from align.fits.fit import Proposal
from align.fits.functions import FUNCTIONS, gated
from align.fits.measured import Measured
from align.fits.noise import roundings_of
from align.fits.rotation import Rotation
from align.sentences import Said, said

Tensor = torch.Tensor
WIDE = torch.float64


def evaluate(case: FitCase, inputs: Mapping[str, Tensor], parameters: Mapping[str, Any] | None = None) -> Exact | None:
    """The operator's result from other inputs or parameters, float64 ``[T, …]``; ``None`` if something is missing.

    Inputs that are float64 are taken as numbers of the model's dtype that are not rounded.
    """
    known = case.parameters if parameters is None else parameters
    operator = case.operator
    dtype = getattr(torch, case.dtype)
    if operator == "rms_norm" and {"x", "weight"} <= inputs.keys() and known.get("eps") is not None:
        return _as(recompute.rms_norm(inputs["x"], inputs["weight"], float(known["eps"]), WIDE), inputs["x"], dtype)
    if operator == "linear" and {"x", "weight"} <= inputs.keys():
        return linear(inputs["x"], inputs["weight"], inputs.get("bias"), dtype)
    if operator in ("silu_mul", "gelu_mul") and {"gate", "up"} <= inputs.keys():
        name = str(known.get("activation") or ("silu" if operator == "silu_mul" else "gelu"))
        return gated(FUNCTIONS[name](inputs["gate"].to(WIDE)), inputs["up"], dtype) if name in FUNCTIONS else None
    if operator == "add" and {"a", "b"} <= inputs.keys():
        return _as(recompute.add(inputs["a"], inputs["b"], WIDE), inputs["a"], dtype)
    if operator == "attention" and {"q", "k", "v"} <= inputs.keys() and known.get("scale") is not None:
        return attend(
            inputs["q"],
            case.positions,
            inputs["k"],
            inputs["v"],
            float(known["scale"]),
            dtype,
            window=known.get("window"),
            softcap=known.get("softcap"),
            sinks=inputs.get("sinks"),
        )
    if operator == "rope" and "x" in inputs and known.get("rope") is not None:
        rotation = Rotation.of(known, inputs["x"].shape[-1], case.positions)
        return None if rotation is None else rotation.exact(inputs["x"], case.positions, dtype)
    return None


def _as(exact: Exact, given: Tensor, dtype: torch.dtype) -> Exact:
    """The floor of a magnitude is that of the model's dtype, whatever dtype the inputs were given in."""
    return Exact(exact.value, exact.magnitude + (0.0 if given.dtype == dtype else recompute.tiny(dtype)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Exact:
    """``x @ weight.T + bias`` with the magnitude of :func:`align.checkpoints.recompute.linear_magnitude`."""
    wide, matrix = x.to(WIDE), weight.to(WIDE)
    product = wide @ matrix.T
    norms = torch.linalg.vector_norm(matrix, dim=-1)
    rows = torch.linalg.vector_norm(wide, dim=-1)
    magnitude = recompute.linear_magnitude(product, rows, norms, x.shape[-1], dtype)
    if bias is None:
        return Exact(product, magnitude)
    value = product + bias.to(WIDE)
    return Exact(value, magnitude + value.abs())


def bound_of(measured: Measured, magnitude: Tensor) -> Tensor:
    """What rounding may add to a recomputed result of this magnitude."""
    case = measured.case
    return measured.floor(measured.whole(magnitude) * (roundings_of(case.operator) * case.unit * measured.sides))


def proposal(
    measured: Measured, kind: str, exact: Exact, text: Said, parameters: Mapping[str, Any], free: int = 0
) -> Proposal:
    """Of a recomputed result."""
    return Proposal(
        kind, measured.whole(exact.value), bound_of(measured, exact.magnitude), text, dict(parameters), free
    )


def propose(measured: Measured) -> Iterator[Proposal]:
    """The same operator of another input, of another weight, or with its two inputs exchanged."""
    case = measured.case
    if "weight" in case.inputs:
        for name, weight in case.weights.items():
            if weight.shape == case.inputs["weight"].shape:
                exact = evaluate(case, {**case.inputs, "weight": weight})
                if exact is not None:
                    text = said("fit.with_weight", operator=case.operator, name=name)
                    yield proposal(measured, "wrong_weight", exact, text, {"weight": name})
    for read in case.inputs:
        if read in ("weight", "bias", "sinks"):
            continue
        for name, other in case.others.items():
            if other.shape == case.inputs[read].shape and other.is_floating_point():
                exact = evaluate(case, {**case.inputs, read: other})
                if exact is not None:
                    text = said("fit.with_input", operator=case.operator, name=name, read=read)
                    yield proposal(measured, "wrong_input", exact, text, {"input": read, "read": name})
