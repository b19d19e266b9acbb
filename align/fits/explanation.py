"""From an accused checkpoint to the kinds of faults that reproduce what was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from align.fits import (
    activation,
    attention,
    factors,
    norm,
    operators,
    order,
    precision,
    projection,
    rope,
    router,
    tensors,
)
from align.fits.case import FitCase
from align.fits.finite import broken
from align.fits.fit import Fit, Proposal
from align.fits.measured import Measured
from align.fits.patterns import patterns
from align.fits.table import kinds
from align.fits.thin import thinned
from align.sentences import said

Tensor = torch.Tensor


class _Proposer(Protocol):
    """What each module of fits has."""

    def propose(self, measured: Measured) -> Iterator[Proposal]: ...


#: Of the error's energy beyond the noise, a fit must explain this share.
SMALLEST_SHARE = 0.5
#: A fit that leaves so many times the energy of the best one is no explanation.
_WORSE = 2.0
#: An explanation with so many numbers more than the simplest one is left out.
_MORE = 1
#: What a best fit leaves counts as at least this, in units of the mean square bound: it may be exact by construction.
_EXACT = 1e-3
#: Compare values in place, with all rows.
_IN_PLACE: tuple[_Proposer, ...] = (factors, tensors, order)
#: Compute something for each row, so that some rows do.
_COMPUTED: tuple[_Proposer, ...] = (precision, operators)
_OF_ONE: dict[str, _Proposer] = {
    "rms_norm": norm,
    "rope": rope,
    "attention": attention,
    "silu_mul": activation,
    "gelu_mul": activation,
    "linear": projection,
    "topk_weights": router,
}


def explain(case: FitCase) -> tuple[Fit, ...]:
    """The kinds of faults that reproduce ``case.bad`` down to the noise, the simplest first.

    Empty if there is nothing to explain: the error is no more than rounding. If nothing reproduces it, what is known
    of it, with ``unexplained`` at the end.
    """
    measured = Measured(case)
    found = broken(measured)
    if found is not None:
        return (found,)
    if not measured.null.any:
        return ()
    fewer = thinned(measured)
    judged: list[tuple[Fit, float]] = []
    for proposal in _proposals(measured, _IN_PLACE):
        judged += _judge(measured, proposal)
    own = _OF_ONE.get(case.operator)
    for proposal in _proposals(fewer, _COMPUTED if own is None else (*_COMPUTED, own)):
        judged += _judge(fewer, proposal)
    return _ordered(judged) or tuple(patterns(measured))


def _proposals(measured: Measured, modules: Iterable[_Proposer]) -> Iterator[Proposal]:
    for module in modules:
        yield from module.propose(measured)


def _judge(measured: Measured, proposal: Proposal) -> list[tuple[Fit, float]]:
    """The fit of a proposal and the energy it leaves: everywhere, or else where the error is; empty if neither."""
    if not bool(torch.isfinite(proposal.value).all()):
        return []
    slack = measured.limits.slack
    left = (measured.sampled(measured.bad - proposal.value) / measured.sampled(proposal.bound)).abs() <= slack
    whole = _accepted(measured, proposal, {}) if bool(left.all()) else None
    if whole is not None:
        return [(whole, _energy(measured, proposal))]
    if not proposal.scoped:
        return []
    right = ~measured.sampled(measured.null.elements)
    for scope in measured.scopes:
        if not bool(torch.where(scope.sample, left, right).all()):
            continue
        part = replace(
            proposal,
            value=torch.where(scope.mask, proposal.value, measured.ref),
            bound=torch.where(scope.mask, proposal.bound, measured.bound),
            text=said("fit.scoped", fit=proposal.text, scope=scope.words),
            free=proposal.free + 1,
        )
        fit = _accepted(measured, part, scope.where)
        if fit is not None:
            return [(fit, _energy(measured, part))]
    return []


def _energy(measured: Measured, proposal: Proposal) -> float:
    return measured.energy(measured.bad - proposal.value, everywhere=True) / measured.bad.numel()


def _accepted(measured: Measured, proposal: Proposal, where: Mapping[str, object]) -> Fit | None:
    if not measured.accepts(proposal.value, proposal.bound):
        return None
    before = measured.energy(measured.bad - measured.ref)
    left = measured.energy(measured.bad - proposal.value)
    share = 1 - left / before if before > 0 else 0.0
    if share < SMALLEST_SHARE:
        return None
    residual = measured.residual(proposal.value, proposal.bound)
    text = said("fit.left", fit=proposal.text, residual=residual)
    return Fit(proposal.kind, True, share, residual, {**proposal.parameters, **where}, proposal.free, text)


def _ordered(judged: list[tuple[Fit, float]]) -> tuple[Fit, ...]:
    """Without what leaves much more than the best, says less than another, or says it again with more numbers."""
    if not judged:
        return ()
    best = max(min(left for _, left in judged), _EXACT)
    table = kinds()
    kept = [fit for fit, left in judged if left <= _WORSE * best]
    fewest = min(fit.free for fit in kept)
    kept = [fit for fit in kept if fit.free <= fewest + _MORE]
    kept.sort(key=lambda fit: (fit.free, table[fit.kind].index, -round(fit.share or 0.0, 2)))
    found: dict[str, Fit] = {}
    for fit in kept:
        if not any(fit.kind in table[kind].more_general for kind in found):
            found.setdefault(fit.kind, fit)
    return tuple(found.values())
