"""Folds recomputed and recorded rows, chunk by chunk, into what is said of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import Exact
from align.compare.residual import ResidualPolicy, judge
from align.oracle.rounding import round_once
from align.oracle.types import Cell, OracleResult, Profile, RowPlace, Skipped

Tensor = torch.Tensor
#: Of the dtype's largest number: a result of this size may be recorded as infinite.
_OVERFLOW = 0.998


class Fold:
    """Statistics of one checkpoint.

    Args:
        rows: how many will come.
        shape: canonical channels.
        dtype: the model's, whose unit counts.
        roundings: that the operator may do, in units of ``u × magnitude``; 0 for a copy.
    """

    def __init__(self, rows: int, shape: Sequence[int], dtype: torch.dtype, roundings: float) -> None:
        self.shape, self._dtype, self._roundings = tuple(shape), dtype, roundings
        self._unit, width = unit_roundoff(dtype), prod(shape)
        heads = self.shape[0] if len(self.shape) == 2 else 0
        #: Per group: weighted sums of e², r², e r, then plain sums of d², y².
        self._tokens, self._channels = (torch.zeros(5, count, dtype=torch.float64) for count in (rows, width))
        self._heads = torch.zeros(5, heads, dtype=torch.float64)
        self._peak_token, self._peak_channel = (torch.zeros(count, dtype=torch.float64) for count in (rows, width))
        self._judged = torch.zeros(rows, dtype=torch.bool)
        self._worst: tuple[float, int, int, float, float, float] | None = None
        self._bad: tuple[int, int] | None = None
        self._elements = self._equal = self._excused = self._non_finite = 0

    def add(self, rows: Tensor, exact: Exact, recorded: Tensor) -> None:
        """Take in rows (int64 ``[R]``, places among all), with float64 results and records ``[R, *channels]``.

        An infinite magnitude marks what is not known.
        """
        if not len(rows):
            return
        value, magnitude = exact.value.flatten(1), exact.magnitude.flatten(1)
        flat = recorded.flatten(1)
        wide, weight = flat.double(), magnitude.reciprocal()
        gap = wide - value
        judged = bad = None
        # A sum tells in one pass whether all is finite, and the smallest weight whether all is known.
        if not (bool((gap.sum() + weight.sum()).isfinite()) and float(weight.min()) > 0):
            known = value.isfinite() & (weight > 0) & weight.isfinite()
            too_large = flat.isinf() & (value.abs() >= torch.finfo(self._dtype).max * _OVERFLOW)
            judged = known & ~too_large
            bad = judged & ~wide.isfinite()
            unusable = ~judged | bad
            gap, weight = gap.masked_fill(unusable, 0.0), weight.masked_fill(unusable, 0.0)
            value = value.masked_fill(unusable, 0.0)
        error, size = gap * weight, value * weight
        for index, (one, other) in enumerate(((error, error), (size, size), (error, size), (gap, gap), (value, value))):
            term = one * other
            self._tokens[index, rows] = term.sum(1)
            by_channel = term.sum(0)
            self._channels[index] += by_channel
            if self._heads.shape[1]:
                self._heads[index] += by_channel.view(self.shape).sum(1)
        peaks = error.abs_().div_(self._unit)
        same = self._same(value, flat)
        if judged is not None and bad is not None:
            peaks.masked_fill_(bad, inf)
            same &= judged & ~bad
            self._excused += int((~judged).sum())
            self._non_finite += int(bad.sum())
        self._peak_token[rows] = peaks.amax(1)
        self._peak_channel = torch.maximum(self._peak_channel, peaks.amax(0))
        self._judged[rows] = True if judged is None else judged.any(1)
        self._elements += flat.numel() if judged is None else int(judged.sum())
        self._equal += int(same.sum())
        self._remember(rows, peaks, bad, (wide, value, magnitude))

    def _same(self, value: Tensor, flat: Tensor) -> Tensor:
        """Where a record is the exact result, rounded once to the model's dtype or to its own."""
        rounded = round_once(value, self._dtype)
        same = rounded == flat if flat.dtype == self._dtype else rounded.to(flat.dtype) == flat
        return same if flat.dtype == self._dtype else same | (round_once(value, flat.dtype) == flat)

    def _remember(self, rows: Tensor, peaks: Tensor, bad: Tensor | None, cells: tuple[Tensor, ...]) -> None:
        """Keep the worst element, and the first that is not finite."""
        row, column = divmod(int(peaks.argmax()), peaks.shape[1])
        peak = float(peaks[row, column])
        if self._worst is None or peak > self._worst[0]:
            recorded, exact, magnitude = (float(one[row, column]) for one in cells)
            self._worst = (peak, int(rows[row]), column, recorded, exact, magnitude)
        if self._bad is None and bad is not None and bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            self._bad = (int(rows[first[0]]), first[1])

    def result(
        self,
        name: str,
        policy: ResidualPolicy,
        operator: str,
        places: Sequence[RowPlace],
        skipped: Sequence[Skipped],
        notes: Sequence[str],
    ) -> OracleResult:
        """Judge all that was taken in."""
        if not bool(self._judged.any()) or self._worst is None:
            reasons = list(dict.fromkeys(one.why for one in skipped))
            if self._excused:
                reasons.append("its exact result is not finite: neither are its inputs")
            why = "; ".join(reasons) or "no row was recorded"
            return OracleResult(name, operator, "not observable", why, skipped=tuple(skipped), excused=self._excused)
        peak, row, column, recorded, exact, magnitude = self._worst
        at = self._bad or (row, column)
        finite_peak = float(self._peak_token[self._peak_token.isfinite()].max()) if self._non_finite else peak
        sums = self._tokens[:3].T.clone()
        sums[~self._judged] = torch.nan
        verdict = judge(
            name,
            operator,
            policy,
            tokens=sums,
            largest=torch.tensor([finite_peak, at[0], at[1], self._non_finite], dtype=torch.float64),
            channels=self._channels[:3].reshape(3, *self.shape),
            channel_rows=int(self._judged.sum()),
            row_names=[(place.request, place.position) for place in places],
            largest_name=(places[at[0]].request, places[at[0]].position),
        )
        allowed = self._roundings * policy.slack
        head = column // self.shape[1] if len(self.shape) == 2 else -1
        bound = allowed * self._unit * magnitude
        return OracleResult(
            name=name,
            operator=operator,
            verdict=verdict.verdict,
            why=verdict.why,
            rows=int(self._judged.sum()),
            skipped=tuple(skipped),
            ratio=_over(peak, allowed),
            roundings=peak,
            allowed=allowed,
            worst=Cell(places[row], column, head, recorded, exact, bound),
            bit_equal=self._equal == self._elements and not self._excused,
            equal=self._equal / max(1, self._elements),
            excused=self._excused,
            residual=verdict,
            places=tuple(places),
            tokens=self._profile(self._tokens, self._peak_token, allowed),
            channels=self._profile(self._channels, self._peak_channel, allowed),
            heads=self._by_head(allowed),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _by_head(self, allowed: float) -> Profile | None:
        if len(self.shape) != 2:
            return None
        return self._profile(self._heads, self._peak_channel.view(self.shape).amax(1), allowed)

    def _profile(self, sums: Tensor, peaks: Tensor, allowed: float) -> Profile:
        _, size, product, gap, whole = sums
        ratio = peaks / allowed if allowed else torch.where(peaks > 0, inf, 0.0).double()
        return Profile(ratio, product / size, (gap / whole).sqrt())


def _over(roundings: float, allowed: float) -> float:
    return roundings / allowed if allowed else (inf if roundings else 0.0)
