"""Results that are not finite although they should be."""

from __future__ import annotations

import torch

from align.fits.factors import LARGEST
from align.fits.fit import Fit
from align.fits.measured import LISTED, Measured
from align.sentences import said

Tensor = torch.Tensor


def broken(measured: Measured) -> Fit | None:
    """NaN and infinities of the accused side where a finite result is expected; ``None`` if there are none.

    Infinities where the expected result is too large for float16 (or for the model's dtype) are an overflow.
    """
    case = measured.case
    bad, ref = measured.whole(case.bad), measured.whole(case.ref)
    wrong = ~torch.isfinite(bad) & torch.isfinite(ref)
    count = int(wrong.sum())
    if not count:
        return None
    nan, infinite = int((wrong & torch.isnan(bad)).sum()), int((wrong & torch.isinf(bad)).sum())
    first = int(torch.nonzero(wrong.flatten(1).any(1)).flatten()[0])
    channel = int(torch.nonzero(wrong[first].flatten()).flatten()[0])
    rows = torch.nonzero(wrong.flatten(1).any(1)).flatten()
    state = {name: _finite_inputs(measured, tensor, first) for name, tensor in case.inputs.items()}
    parameters = {
        "nan": nan,
        "infinite": infinite,
        "tokens": rows[:LISTED].tolist(),
        "tokens_total": len(rows),
        "position": int(case.positions[first]),
        "request": case.requests[first] if case.requests else None,
        "channel": channel,
        "inputs_finite": state,
    }
    limits = {**LARGEST, case.dtype: float(torch.finfo(getattr(torch, case.dtype)).max)}
    for name, largest in sorted(limits.items(), key=lambda one: one[1]):
        may, must = (ref.abs() > largest * (1 + by * case.unit) for by in (-2, 2))  # what rounds up to too much
        if name in ("float16", case.dtype) and not nan and bool((may | ~wrong).all()) and bool((wrong | ~must).all()):
            text = said("fit.overflow", count=count, limit=largest, dtype=name)
            return Fit("overflow", True, 1.0, 0.0, {**parameters, "dtype": name, "limit": largest}, 0, text)
    broken_inputs = [name for name, finite in state.items() if not finite]
    inputs = said("fit.inputs_finite")
    if not state:
        inputs = said("fit.inputs_unknown")
    elif broken_inputs:
        inputs = said("fit.inputs_broken", names=broken_inputs)
    text = said(
        "fit.nonfinite",
        nan=nan,
        infinite=infinite,
        request=f"{case.requests[first]} " if case.requests else "",
        position=parameters["position"],
        channel=channel,
        inputs=inputs,
    )
    return Fit("nonfinite", True, None, None, parameters, 0, text)


def _finite_inputs(measured: Measured, tensor: Tensor, row: int) -> bool:
    """Whether what the row reads of an input is finite: its own row, or all of it if rows are not shared."""
    read = tensor[row] if len(tensor) == measured.shape[0] and tensor.dim() > 1 else tensor
    return bool(torch.isfinite(read).all())
