"""Casts: results that lie on the grid of a coarser dtype, and operators of inputs that were rounded to one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from align.checkpoints.bounds import unit_roundoff
from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.fits.noise import beyond
from align.fits.operators import evaluate, proposal
from align.sentences import said

Tensor = torch.Tensor
WIDE = torch.float64
#: Bits of the significand of what values may be cast to, the hidden one included.
GRIDS: dict[str, tuple[torch.dtype, int]] = {
    "float16": (torch.float16, 11),
    "bfloat16": (torch.bfloat16, 8),
    "float8_e4m3fn": (torch.float8_e4m3fn, 4),
    "float8_e5m2": (torch.float8_e5m2, 3),
}
#: Of the results that may show a grid, how many must lie on it, and how few must by chance.
_ON, _CHANCE = 0.999, 0.5
#: Elements that a grid must be seen in.
_FEWEST = 64
#: Steps of int8 up to which rounding to the model's dtype leaves the grid visible.
_VISIBLE = 12.0


def propose(measured: Measured) -> Iterator[Proposal]:
    """Grids of the result first, then roundings of each input and of the weight."""
    yield from _on_float_grid(measured)
    yield from _on_int8_grid(measured)
    yield from _rounded_inputs(measured)
    yield from _evaluated_low(measured)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to a dtype, saturating, float64."""
    largest = float(torch.finfo(dtype).max)
    return x.to(torch.float32).clamp(-largest, largest).to(dtype).to(WIDE)


def int8(x: Tensor, over: tuple[int, ...] | None) -> Tensor:
    """``x`` in 255 steps of its largest absolute value over some axes (``None``: over all)."""
    wide = x.to(WIDE)
    largest = wide.abs().max() if over is None else wide.abs().amax(over, keepdim=True)
    scale = (largest / 127).clamp_min(torch.finfo(WIDE).tiny)
    return (wide / scale).round().clamp(-127, 127) * scale


def _coarser(measured: Measured) -> Iterator[tuple[str, torch.dtype, int]]:
    """Dtypes that lose bits of the model's."""
    for name, (dtype, bits) in GRIDS.items():
        if 2.0**-bits > unit_roundoff(measured.case.dtype):
            yield name, dtype, bits


def _on_float_grid(measured: Measured) -> Iterator[Proposal]:
    """Every result is a number of the coarser dtype, and no further from the expected one than half a step."""
    case = measured.case
    native = getattr(torch, case.dtype)
    normal = measured.ref.to(native).to(WIDE)
    counted = measured.finite & (measured.bad != 0)
    for name, dtype, bits in _coarser(measured):
        if int(counted.sum()) < _FEWEST:
            return
        on = float((rounded(measured.bad, dtype) == measured.bad)[counted].double().mean())
        chance = float((rounded(normal, dtype) == normal)[counted].double().mean())
        if on < _ON or chance > _CHANCE:
            continue
        step = 2.0**-bits * measured.ref.abs().clamp_min(float(torch.finfo(dtype).tiny))
        error = measured.bad - measured.ref
        text = said("fit.grid", share=on, dtype=name, chance=chance)
        if bool((error.abs() <= step * 1.02 + measured.bound)[measured.finite].all()):
            text = said("fit.grid_rounded", grid=text)
        elif beyond(error, measured.bound * (2.0**-bits / measured.case.unit), measured.ref, measured.limits).any:
            continue
        else:
            text = said("fit.grid_operator", grid=text, operator=case.operator, dtype=name)
        parameters = {"dtype": name, "of": "the result"}
        # A number near the middle of two steps may go either way: what was recorded tells which.
        yield Proposal("cast", measured.bad, measured.bound, text, parameters, scoped=False)


def _on_int8_grid(measured: Measured) -> Iterator[Proposal]:
    """Every small result is a multiple of the largest one / 127, along some axis."""
    groups: dict[str, tuple[int, ...] | None] = {"token": (1, 2), "tensor": None, "channel": (0,), "head": (2,)}
    for per, over in groups.items():
        largest = measured.ref.abs().max() if over is None else measured.ref.abs().amax(over, keepdim=True)
        scale = (largest / 127).clamp_min(torch.finfo(WIDE).tiny).expand_as(measured.ref)
        steps = measured.bad / scale
        small = measured.finite & (steps.abs() <= _VISIBLE) & (measured.ref.abs() > 0)
        if int(small.sum()) < _FEWEST:
            continue
        off = (steps - steps.round()).abs()[small]
        on = float((off <= 2.5 * measured.case.unit * _VISIBLE).double().mean())
        near = (measured.bad - measured.ref).abs() <= scale * 0.52 + 2 * measured.bound
        if on < _ON or not bool(near[measured.finite].all()):
            continue
        text = said("fit.int8_grid", share=on, per=per)
        parameters = {"dtype": "int8", "of": "the result", "per": per}
        yield Proposal("cast", measured.bad, measured.bound, text, parameters, scoped=False)


def _rounded_inputs(measured: Measured) -> Iterator[Proposal]:
    case = measured.case
    for name, tensor in case.inputs.items():
        if not tensor.is_floating_point():
            continue
        for form, cast in _casts(measured, tensor).items():
            changed = cast(tensor)
            if torch.equal(changed, tensor.to(WIDE)):
                continue
            exact = evaluate(case, {**case.inputs, name: changed})
            if exact is not None:
                text = said("fit.rounded_input", operator=case.operator, name=name, to=form)
                yield proposal(measured, "cast_input", exact, text, {"input": name, "to": form})
    pair = [name for name in ("x", "weight") if name in case.inputs]
    if len(pair) == 2 and case.operator == "linear":
        for one in ("each row", "the tensor"):
            over = (-1,) if one == "each row" else None
            both = {name: int8(case.inputs[name], over) for name in pair}
            exact = evaluate(case, {**case.inputs, **both})
            if exact is not None:
                text = said("fit.int8_product", one=one)
                parameters = {"input": "x, weight", "to": f"int8, {one}"}
                yield proposal(measured, "cast_input", exact, text, parameters)


def _casts(measured: Measured, tensor: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, dtype, _ in _coarser(measured):

        def cast(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return rounded(x, dtype)

        found[name] = cast
    found["int8, the tensor"] = lambda x: int8(x, None)
    if tensor.dim() > 1:
        found["int8, each row"] = lambda x: int8(x, (-1,))
        found["int8, each column"] = lambda x: int8(x, (0,))
    return found


def _evaluated_low(measured: Measured) -> Iterator[Proposal]:
    """The norm and the activation with every step rounded to a coarser dtype."""
    case = measured.case
    for name, dtype, bits in _coarser(measured):
        if bits < 8:  # nobody computes in 8 bits
            continue
        value: Tensor | None = None
        eps = case.number("eps")
        if case.operator == "rms_norm" and case.has("x", "weight") and eps is not None:
            x = case.inputs["x"].to(dtype)
            value = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * case.inputs["weight"].to(dtype)
        elif case.operator == "silu_mul" and case.has("gate", "up"):
            value = torch.nn.functional.silu(case.inputs["gate"].to(dtype)) * case.inputs["up"].to(dtype)
        elif case.operator == "add" and case.has("a", "b"):
            value = case.inputs["a"].to(dtype) + case.inputs["b"].to(dtype)
        if value is not None:
            made = measured.whole(value)
            # The order of the steps is not known: what the last one may add in the coarser dtype is allowed.
            bound = measured.floor(measured.bound + 2.0**-bits * made.abs())
            parameters: dict[str, Any] = {"dtype": name, "of": "every step"}
            yield Proposal("cast", made, bound, said("fit.every_step", dtype=name), parameters)
