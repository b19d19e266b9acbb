"""Sums of the errors of one kind of checkpoint over channels and rows, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from align.checkpoints.recompute import Exact

Tensor = torch.Tensor
#: An error relative to its magnitude is cut off here, so that its square stays finite.
CEILING = 1e6


class Sums:
    """Sums for ``layers`` layers and ``rows`` rows of ``shape`` channels; see ``StepResiduals`` for their meaning.

    Attributes:
        tokens: float32 ``[L, R, 3]``.
        channels: float32 ``[L, 3, C]``.
        seen: bool ``[L]``, layers of which a row could be recomputed.
    """

    def __init__(self, layers: int, rows: int, shape: Sequence[int], unit: float) -> None:
        self.layers, self.shape, self.width = layers, tuple(shape), prod(shape)
        self._unit = unit
        self.tokens = torch.zeros(layers, rows, 3)
        self.channels = torch.zeros(layers, 3, self.width)
        self._peaks = torch.zeros(layers)
        self._rows = torch.zeros(layers, dtype=torch.int64)
        self._columns = torch.zeros(layers, dtype=torch.int64)
        self._non_finite = torch.zeros(layers)
        self.seen = torch.zeros(layers, dtype=torch.bool)

    def add(self, low: int, exact: Exact, recorded: Tensor) -> None:
        """Take in layers ``low …``: recomputed and recorded values ``[l, R, *channels]``.

        An infinite magnitude marks what is not known. The magnitude is used up.
        """
        value = exact.value.flatten(2)
        weight = exact.magnitude.flatten(2).reciprocal_()
        flat = recorded.flatten(2)
        error, size = (flat.float() - value).mul_(weight), value * weight
        high = low + error.shape[0]
        known = bad = None
        if not self._sum(low, high, error, size):
            known = value.isfinite() & (weight > 0)
            bad = _cleaned(error, size, flat, value, known)
            self._non_finite[low:high] = bad.flatten(1).sum(1)
            self._sum(low, high, error, size)
        if error.shape[1] == 0:
            return
        peaks = error.abs_().amax(2)
        best, rows = peaks.max(1)
        layers = torch.arange(high - low)
        self._peaks[low:high], self._rows[low:high] = best, rows
        self._columns[low:high] = error[layers, rows].argmax(1)
        if bad is not None:
            self._point_at(low, bad)
        self.seen[low:high] = True
        if not bool((self.tokens[low:high, :, 1] > 0).all()):  # zeros, or not known
            seen = (weight > 0 if known is None else known).any(2)
            self.tokens[low:high].masked_fill_(~seen.unsqueeze(2), torch.nan)
            self.seen[low:high] = seen.any(1)

    def _sum(self, low: int, high: int, error: Tensor, size: Tensor) -> bool:
        """Sum up; whether all is finite."""
        product = torch.empty_like(error)
        for index, (a, b) in enumerate(((error, error), (size, size), (error, size))):
            torch.mul(a, b, out=product)
            self.tokens[low:high, :, index] = product.sum(2)
            self.channels[low:high, index] = product.sum(1)
        return bool(self.tokens[low:high].isfinite().all())

    def _point_at(self, low: int, bad: Tensor) -> None:
        """Where an element is not finite, its row and channel are told instead of those of the largest error."""
        for layer in bad.flatten(1).any(1).nonzero()[:, 0].tolist():
            row, column = bad[layer].nonzero()[0].tolist()
            self._rows[low + layer], self._columns[low + layer] = row, column

    def largest(self, rows: Tensor) -> Tensor:
        """``NAME#res_max`` of every layer, float32 ``[L, 4]``; ``rows``: the step's row of each row here."""
        where = rows[self._rows] if len(rows) else torch.full_like(self._rows, -1)
        return torch.stack((self._peaks / self._unit, where.float(), self._columns.float(), self._non_finite), dim=1)


class ChannelSums:
    """Sums over the rows of many steps, of one kind of checkpoint: ``NAME#res_ch`` of every layer."""

    def __init__(self, layers: int, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._sums = torch.zeros(layers, 3, prod(shape))
        self._seen = torch.zeros(layers, dtype=torch.bool)

    def add(self, channels: Tensor, good: Tensor) -> None:
        """Add a step's sums ``[L, 3, C]`` for the layers that are ``good``."""
        if bool(good.all()):
            self._sums += channels
        else:
            self._sums[good] += channels[good]
        self._seen |= good

    def layers(self) -> Iterator[tuple[int, Tensor]]:
        """Copies of the sums of every layer that was seen, ``[3, *channels]``."""
        for layer in self._seen.nonzero()[:, 0].tolist():
            yield layer, self._sums[layer].reshape(3, *self._shape).clone()


def _cleaned(error: Tensor, size: Tensor, recorded: Tensor, value: Tensor, known: Tensor) -> Tensor:
    """Make ``error`` and ``size`` finite, in place; which recorded elements should have been finite.

    Where the exact result is not finite, the inputs were not, and this operator is not to blame. A result beyond the
    dtype's range may be recorded as infinite.
    """
    too_large = recorded.isinf() & (value.abs() >= torch.finfo(recorded.dtype).max * 0.998)
    bad = known & ~recorded.isfinite() & ~too_large
    excused = ~known | too_large | bad
    error.masked_fill_(excused, 0.0).nan_to_num_(posinf=CEILING, neginf=-CEILING).clamp_(-CEILING, CEILING)
    size.masked_fill_(excused, 0.0)
    return bad
