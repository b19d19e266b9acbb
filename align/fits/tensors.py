"""Results that equal another tensor: another checkpoint's, an input's, an earlier step's; sums with a term too few."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod, sqrt

import torch

from align.fits.factors import tolerance
from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.sentences import Said, said

Tensor = torch.Tensor


def propose(measured: Measured) -> Iterator[Proposal]:
    """Equal to something else, then the sum of the expected result and a multiple of something else."""
    case = measured.case
    size = prod(measured.shape)
    same_shape = {name: x for name, x in case.inputs.items() if x.shape == case.bad.shape and name != "weight"}
    for name, tensor in same_shape.items() if case.operator != "add" else ():  # a sum has terms
        yield _equals(measured, "skipped", tensor, said("fit.unchanged", name=name), {"input": name})
    if case.previous is not None and case.previous.shape[1:] == case.bad.shape[1:]:
        held = case.previous[: measured.shape[0]]
        if held.shape == case.bad.shape:
            yield _equals(measured, "stale", held, said("fit.stale"), {})
    for name, tensor in case.others.items():
        if tensor.numel() == size and tensor.is_floating_point() and tensor.shape[0] == case.bad.shape[0]:
            yield _equals(measured, "exchanged", tensor, said("fit.exchanged", name=name), {"other": name})
    yield from _terms(measured, same_shape)


def _equals(measured: Measured, kind: str, tensor: Tensor, text: Said, parameters: dict[str, str]) -> Proposal:
    value = measured.whole(tensor)
    return Proposal(kind, value, measured.typical_bound(value), text, parameters)


def _terms(measured: Measured, inputs: dict[str, Tensor]) -> Iterator[Proposal]:
    """``bad = ref + k × term``: k is -1 for a term left out, 1 for one added twice."""
    case = measured.case
    terms = {}
    if case.operator in ("add", "moe", "experts", "shared_experts"):
        terms.update({name: measured.whole(tensor) for name, tensor in inputs.items()})
    if "bias" in case.inputs:
        bias = case.inputs["bias"].to(torch.float64).reshape(measured.shape[1:])
        terms["bias"] = bias[None].expand(measured.shape)
    for name, term in terms.items():
        yield from _times(measured, name, term, own=True)
    for name, tensor in case.others.items():
        if tensor.numel() == prod(measured.shape) and tensor.is_floating_point():
            yield from _times(measured, name, measured.whole(tensor), own=False)


def _times(measured: Measured, name: str, term: Tensor, own: bool) -> Iterator[Proposal]:
    weight = measured.bound.square().reciprocal() * measured.null.tokens[:, None, None]
    squares = float((term.square() * weight).sum())
    if squares == 0:
        return
    fitted = float(((measured.bad - measured.ref) * term * weight).sum()) / squares
    spread = 0.02 + 4 * tolerance(measured, measured.bad.numel()) + 4 / sqrt(squares)
    times, free = fitted, 1
    tp = measured.case.number("tp") or 1.0
    for known in (-1.0, 1.0, tp - 1.0, 1 / tp - 1.0):
        if known and abs(fitted - known) <= spread:
            times, free = known, 0
            break
    if free and not own:  # any tensor correlates a little with any error
        return
    keys = {-1.0: "fit.left_out", 1.0: "fit.added_twice"} if own else {-1.0: "fit.subtracted", 1.0: "fit.added"}
    key = keys.get(times, "fit.added_times" if own else "fit.times_added")
    words = said(key, name=name, times=1 + times if own else times)
    kind = "term_missing" if times == -1.0 and own else "term_added"
    value = measured.ref + times * term
    # The terms may be rounded by themselves, and cancel afterwards.
    bound = measured.typical_bound(value) + measured.case.unit * (measured.ref.abs() + abs(times) * term.abs())
    yield Proposal(kind, value, bound, words, {"term": name, "times": times}, free)
