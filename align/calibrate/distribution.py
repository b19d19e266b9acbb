"""From numbers to a distribution, and from a distribution to a threshold by extreme-value reasoning.

A floor sees few executions and must not accuse any that comes later, so the largest number seen is not enough. Above a
high quantile, relative distances of right engines fall off at least as fast as a power law: for a distance ``x`` above
``q`` (the 0.9 quantile) ``log(x / q)`` is taken as exponential with mean ``b``. That is heavier than any sum of
independent roundings, so it errs towards silence. Then ``x`` is exceeded with probability :data:`EXCEEDED` at
``q × exp(b × log(0.1 / EXCEEDED))``, which over the largest number seen is the margin.

``b`` is the larger of the mean of ``log(x / q)`` above ``q`` (the estimator of Hill, 1975) and of
``log(max / q) / log(0.1 n)``, the value for which the largest of ``n`` numbers is where it was expected. The numbers of
one run are not independent (the worst token of a request is the worst of all rows too), so that the true ``n`` is
smaller and a repeated largest number looks like a heavy tail: the margin is at least :data:`LEAST_MARGIN`, and where it
becomes very large the derived bound judges. Fewer than
:data:`FEW` numbers say nothing about a tail: there it is :data:`FEW_MARGIN`.

A comparison makes about 12 tests of each checkpoint (4 metrics; all rows and two phases), 1,000 for a model of 4 layers
and 7,000 for one of 30: with 1e-7 for each, one in a thousand comparisons of right engines is accused by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

from align.case.schema import Strict

#: Probability with which a right engine exceeds a threshold, for each test.
EXCEEDED = 1e-7
LEAST_MARGIN = 1.5
FEW = 30
FEW_MARGIN = 4.0
_TAIL = 0.1


class Distribution(Strict):
    """Numbers of one kind of checkpoint and metric.

    Attributes:
        count: how many.
        zeros: how many of them are 0: tensors that were equal.
        median, q90, q99: quantiles of the others; 0 if there are none.
        largest: of all.
        raw: the largest in its own unit, where that is another: the relative L2, or the residual.
        tail: ``b`` of the module's text; 0 if there are fewer than :data:`FEW` numbers above 0.
        where: checkpoint, rows and pair of the largest.
    """

    count: int
    zeros: int
    median: float
    q90: float
    q99: float
    largest: float
    raw: float
    tail: float
    where: str

    @property
    def margin(self) -> float:
        """Factor on the largest number, see the module's text."""
        if self.count - self.zeros < FEW:
            return FEW_MARGIN
        level = self.q90 * exp(self.tail * log(_TAIL / EXCEEDED))
        return max(LEAST_MARGIN, level / self.largest)

    @property
    def limit(self) -> float:
        """The threshold: largest × margin."""
        return self.largest * self.margin


def distribution_of(values: Sequence[float], raws: Sequence[float], wheres: Sequence[str]) -> Distribution:
    """Of numbers that are not negative; ``raws`` and ``wheres`` belong to them one by one.

    Raises:
        ValueError: no numbers, or one that is not finite: then a run was not clean.
    """
    found = np.asarray(values, np.float64)
    if not found.size:
        raise ValueError("no numbers")
    if not np.isfinite(found).all():
        raise ValueError(f"not finite: {wheres[int(np.flatnonzero(~np.isfinite(found))[0])]}")
    positive = found[found > 0]
    median, q90, q99 = (float(q) for q in np.quantile(positive, (0.5, 0.9, 0.99))) if positive.size else (0.0, 0.0, 0.0)
    at = int(found.argmax())
    return Distribution(
        count=int(found.size),
        zeros=int(found.size - positive.size),
        median=median,
        q90=q90,
        q99=q99,
        largest=float(found[at]),
        raw=float(raws[at]),
        tail=_tail_of(positive, q90),
        where=wheres[at],
    )


def _tail_of(positive: np.ndarray[tuple[int, ...], np.dtype[np.float64]], q90: float) -> float:
    if positive.size < FEW:
        return 0.0
    above = np.log(positive[positive > q90] / q90)
    if not above.size:
        return 0.0
    return float(max(above.mean(), above.max() / log(_TAIL * positive.size)))
