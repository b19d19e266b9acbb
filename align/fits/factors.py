"""Constant ratios: of everything, or of some tokens, heads and channels; and results cut off at a largest value."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch

from align.fits.constants import NEVER, named, or_named
from align.fits.fit import Proposal
from align.fits.measured import FEWEST, LISTED, Measured, counted
from align.sentences import Said, said

Tensor = torch.Tensor
#: The largest numbers of dtypes that a kernel may go through (int8: in units of its scale, so not here).
LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def propose(measured: Measured) -> Iterator[Proposal]:
    """A factor on everything, then on slices along one axis, then on tokens × channels."""
    everywhere = _gain(measured, (0, 1, 2))
    yield _factor(measured, everywhere, "factor", {}, said("fit.everything"), 1)
    null = measured.null
    _, H, D = measured.shape
    heads_and_channels = null.channels.reshape(H, D)
    for kind, mask, over, subject in (
        ("factor_tokens", null.tokens[:, None, None], (1, 2), "token"),
        ("factor_heads", null.heads[None, :, None], (0, 2), "head"),
        ("factor_channels", heads_and_channels[None], (0,), "channel"),
    ):
        if kind == "factor_heads" and H == 1:
            continue
        yield from _slices(measured, mask, over, kind, subject)
    if H > 1:  # the same dimension of every head, as a wrong weight of q_norm has it
        yield from _slices(measured, _dimensions(measured)[None, None], (0, 1), "factor_channels", "dimension")
    if not bool(null.tokens.all()):
        for kind, axis, mask in (
            ("factor_heads", "heads", null.heads[None, :, None]),
            ("factor_channels", "channels", heads_and_channels[None]),
        ):
            block = null.tokens[:, None, None] & mask
            if bool(mask.all()) or int(block.expand(measured.shape).sum()) < FEWEST:
                continue
            gain = _gain(measured, (0, 1, 2), block)
            where = {"tokens": measured.indices("tokens"), axis: measured.indices(axis)}
            counts = [counted(int(null.tokens.sum()), "tokens"), counted(int(mask.sum()), axis)]
            what = said("fit.each_element", counts=counts)
            yield _factor(measured, gain, kind, where, what, 3, block)
    yield from _clamped(measured)


def _indices(mask: Tensor) -> list[int]:
    """Where a bool vector is true, at most :data:`LISTED`."""
    found: list[int] = torch.nonzero(mask.flatten()).flatten()[:LISTED].tolist()
    return found


def _dimensions(measured: Measured) -> Tensor:
    """Which dimensions ``[D]`` are beyond in some head."""
    return measured.null.channels.reshape(measured.shape[1:]).any(0)


def _gain(measured: Measured, over: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """The best factor of each slice: least squares in units of the bound; 1 where the reference is zero."""
    weight = measured.bound.square().reciprocal()
    if mask is not None:
        weight = weight * mask
    squares = (measured.ref.square() * weight).sum(over, keepdim=True)
    products = (measured.bad * measured.ref * weight).sum(over, keepdim=True)
    return torch.where(squares > 0, products / squares.clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def tolerance(measured: Measured, elements: float) -> float:
    """How exactly a ratio of ``elements`` elements is known: the common rounding and four deviations."""
    return measured.limits.token + measured.case.unit / 2 + 4 * measured.relative / sqrt(3 * max(elements, 1.0))


def _factor(
    measured: Measured,
    gain: Tensor,
    kind: str,
    where: dict[str, Any],
    subject: Said,
    free: int,
    mask: Tensor | None = None,
) -> Proposal:
    """One ratio, of what ``mask`` has."""
    ratio = float(gain.flatten()[0])
    count = measured.bad.numel() if mask is None else float(mask.expand_as(measured.bad).sum())
    close = tolerance(measured, count)
    names = named(ratio, measured.case.parameters, close)
    if mask is None and abs(ratio + 1) <= close:
        kind, ratio, free = "sign", -1.0, 0
    if NEVER in names or abs(ratio) <= close * 1e-3:
        ratio, names = 0.0, [NEVER]
    value, bound = ratio * measured.ref, measured.scaled_bound(ratio)
    if mask is not None:
        value, bound = torch.where(mask, value, measured.ref), torch.where(mask, bound, measured.bound)
    text = said("fit.factor", subject=subject, ratio=or_named(ratio, names))
    parameters = {"ratio": ratio, "named": names, **where}
    return Proposal(kind, value, bound, text, parameters, free, scoped=False)


def _slices(measured: Measured, mask: Tensor, over: tuple[int, ...], kind: str, subject: str) -> Iterator[Proposal]:
    """The slices of ``mask`` with one common ratio, and each with its own."""
    count = int(mask.sum())
    size = measured.bad.numel() // mask.numel()
    if not count or size < FEWEST:
        return
    key = {"token": "tokens", "head": "heads", "channel": "channels", "dimension": "dimensions"}[subject]
    where: dict[str, Any] = {key: _indices(mask), f"{key}_total": count}
    what = said("fit.one", what=subject, index=where[key][0])
    if count > 1:
        more = " …" if count > 8 else ""
        what = said("fit.each", count=count, of=mask.numel(), what=key, listed=where[key][:8], more=more)
    if count < mask.numel():
        common = _gain(measured, (0, 1, 2), mask)
        yield _factor(measured, common, kind, where, what, 2, mask)
    if count == 1:
        return
    own = torch.where(mask, _gain(measured, over), 1.0)
    ratios = [float(one) for one in own[mask][:LISTED]]
    text = said("fit.own_ratios", subject=what, least=min(ratios), most=max(ratios))
    value, bound = own * measured.ref, measured.scaled_bound(own)
    yield Proposal(kind, value, bound, text, {"ratios": ratios, **where}, 1 + count, scoped=False)


def _clamped(measured: Measured) -> Iterator[Proposal]:
    """Cut off at the largest number that occurs, if several elements have it and should be larger."""
    largest = float(measured.bad.abs().max())
    at = measured.bad.abs() == largest
    should = at & (measured.ref.abs() > largest) & measured.null.elements
    if largest == 0 or int(should.sum()) < 2:
        return
    names = [name for name, limit in LARGEST.items() if abs(limit / largest - 1) <= measured.case.unit]
    text = said("fit.clamped", limit=largest)
    if names:
        text = said("fit.clamped_dtype", limit=largest, dtype=names[0])
    parameters = {"limit": largest, "named": names, "elements": int(should.sum())}
    yield Proposal("clamped", measured.ref.clamp(-largest, largest), measured.bound, text, parameters, 1, scoped=False)
