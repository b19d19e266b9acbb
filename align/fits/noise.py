"""The null hypothesis: is an error no more than rounding?

The same tests as in :mod:`align.compare.residual`, on values instead of sums. With ``e`` the error of an element and
``r`` its value, both divided by the element's bound, and ``c`` the number of roundings that the bound consists of:

* element: ``|e| <= 1``;
* token: the root mean square of ``e`` over the channels is at most that of independent roundings, ``1 / sqrt(3 c)``
  each, and the gain ``sum(e r) / sum(r r)`` at most what may err in common plus ``z`` deviations;
* channel and head: the gain likewise.

An explanation is accepted when what it leaves of the error passes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch

from align.checkpoints.bounds import bounds
from align.fits.case import FitCase

Tensor = torch.Tensor


@dataclass(frozen=True)
class Limits:
    """What rounding may do, apart from any error.

    Attributes:
        roundings: that the elements' bounds consist of.
        token: gain that the elements of one token, or of one head, may have in common.
        channel: gain that the rows of one channel may have in common (equal rows are rounded alike).
        z: deviations allowed to sums of independent roundings.
        slack: factor on the elements' bounds.
    """

    roundings: float
    token: float
    channel: float
    z: float = 6.0
    slack: float = 1.02


def roundings_of(operator: str) -> float:
    """That the bound of an element consists of; at least one, also of an operator that is not known."""
    known = bounds().get(operator)
    return 1.0 if known is None else max(known.max_roundings, 1.0)


def limits_of(case: FitCase, sides: float) -> Limits:
    """Of the case's operator; an unknown one has one rounding, all of which may be common.

    ``sides`` is how many times the operator's own noise is allowed.
    """
    known = bounds().get(case.operator)
    unit = case.unit * sides
    if known is None:
        return Limits(1.0, 1.25 * unit, 2.0 * unit)
    return Limits(roundings_of(case.operator), known.gain_roundings * unit, known.max_roundings * unit)


@dataclass(frozen=True)
class Beyond:
    """Which slices of an error are more than rounding: bool ``tokens`` ``[T]``, ``heads`` ``[H]``, ``channels``
    ``[H × D]``, and single ``elements`` ``[T, H, D]``.
    """

    tokens: Tensor
    heads: Tensor
    channels: Tensor
    elements: Tensor

    @property
    def any(self) -> bool:
        """Whether the error is more than rounding anywhere."""
        return bool(self.tokens.any() or self.heads.any() or self.channels.any())


def beyond(error: Tensor, bound: Tensor, value: Tensor, limits: Limits) -> Beyond:
    """Test an ``error`` ``[T, H, D]`` of a ``value`` against the elements' ``bound``; an infinite bound excludes."""
    T, H, D = error.shape
    e, r = error / bound, value / bound
    deviation = 1 / sqrt(3 * limits.roundings)
    elements = ~(e.abs() <= limits.slack)
    squares, products = r.square(), e * r
    common = limits.token / limits.channel if limits.channel else 0.0
    rms_limit = sqrt(deviation**2 * (1 + limits.z * sqrt(2 / (H * D))) + common**2)
    tokens = elements.flatten(1).any(1) | ~(e.square().mean((1, 2)).sqrt() <= rms_limit)
    tokens |= _gain(products.sum((1, 2)), squares.sum((1, 2)), limits.token, limits.z * deviation)
    heads = elements.any(2).any(0)
    if H > 1:
        heads |= _gain(products.sum((0, 2)), squares.sum((0, 2)), limits.token, limits.z * deviation * sqrt(T))
    channels = elements.any(0)
    channels |= _gain(products.sum(0), squares.sum(0), limits.channel, limits.z * deviation)
    return Beyond(tokens, heads, channels.flatten(), elements)


def _gain(products: Tensor, squares: Tensor, common: float, deviation: float) -> Tensor:
    """Where the gain ``sum(e r) / sum(r r)`` exceeds what is allowed; a slice of zeros has none."""
    known = squares > 0
    safe = squares.masked_fill(~known, 1.0)
    return known & ~((products / safe).abs() <= common + deviation / safe.sqrt())
