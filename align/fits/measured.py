"""A case in float64, its noise, and where its error is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any

import torch

from align.checkpoints.recompute import tiny
from align.fits.case import FitCase
from align.fits.noise import Beyond, beyond, limits_of, roundings_of
from align.sentences import Said, said

Tensor = torch.Tensor
#: How many indices and numbers are listed.
LISTED = 64
#: Fewer elements than these fit anything.
FEWEST = 8
#: Elements that are looked at first, half of them the worst ones.
_SAMPLE = 2048


def counted(count: int, plural: str) -> Said:
    """``1 token``, ``2 tokens``."""
    return said("fit.counted", count=count, what=plural.removesuffix("s") if count == 1 else plural)


@dataclass(frozen=True)
class Scope:
    """A part of a case: a ``mask`` that broadcasts to it, the mask at the sample, what it is as data and in words."""

    mask: Tensor
    sample: Tensor
    where: Mapping[str, Any]
    words: Said


class Measured:
    """A case in float64 as ``[T, H, D]`` (one head if it has none), with elements that are not finite set aside.

    Attributes:
        case: as given.
        bad, ref, bound: float64 ``[T, H, D]``; where a side is not finite, both are 0 and the bound is infinite.
        finite: bool ``[T, H, D]``, what takes part.
        rows: int64 ``[T]``, which rows of a larger case these are.
    """

    def __init__(self, case: FitCase, rows: Tensor | None = None) -> None:
        self.case = case
        self.rows = torch.arange(len(case.bad)) if rows is None else rows
        T = case.bad.shape[0]
        self.shape: tuple[int, int, int] = (T, case.bad.shape[1] if case.bad.dim() == 3 else 1, case.bad.shape[-1])
        bad, ref = self.whole(case.bad), self.whole(case.ref)
        self.finite = torch.isfinite(bad) & torch.isfinite(ref)
        self.all_finite = bool(self.finite.all())
        self.bad = bad if self.all_finite else bad.masked_fill(~self.finite, 0.0)
        self.ref = ref if self.all_finite else ref.masked_fill(~self.finite, 0.0)
        if isinstance(case.noise, Tensor):
            bound = self.whole(case.noise)
        else:
            bound = float(case.noise) * (self.ref.abs() + self.row_size(self.ref))
        self.bound = self.floor(bound)
        self.limits = limits_of(case, self.sides)

    def whole(self, tensor: Tensor) -> Tensor:
        """Any tensor of the case's size, as float64 ``[T, H, D]``."""
        return tensor.detach().to(torch.float64).reshape(self.shape)

    def floor(self, bound: Tensor) -> Tensor:
        """Bounds that can be divided by, infinite where nothing is compared."""
        smallest = self.case.unit * tiny(getattr(torch, self.case.dtype))
        raised = bound.clamp_min(smallest)
        return raised if self.all_finite else raised.masked_fill(~self.finite, inf)

    @cached_property
    def movable(self) -> Tensor:
        """Bounds that may be moved to other elements: those of what is not compared become ordinary."""
        if self.all_finite or not bool(self.finite.any()):
            return self.bound
        return self.bound.masked_fill(~self.finite, float(self.bound[self.finite].max()))

    @staticmethod
    def row_size(value: Tensor) -> Tensor:
        """Root mean square of each row ``[T, 1, 1]``."""
        return value.square().mean((1, 2), keepdim=True).sqrt()

    @cached_property
    def null(self) -> Beyond:
        """The error itself, tested."""
        return beyond(self.bad - self.ref, self.bound, self.ref, self.limits)

    @cached_property
    def relative(self) -> float:
        """The bound relative to the expected result, over all."""
        size = float(self.ref.square().sum())
        bound = self.bound if self.all_finite else self.bound.masked_fill(~self.finite, 0.0)
        return sqrt(float(bound.square().sum()) / size) if size > 0 else self.case.unit

    @cached_property
    def sides(self) -> float:
        """How many times the operator's own noise is allowed: between the sides it may hold what came before."""
        if self.case.against == "oracle":
            return 1.0
        return max(2.0, self.relative / (roundings_of(self.case.operator) * self.case.unit))

    def typical_bound(self, value: Tensor) -> Tensor:
        """What rounding may add to another value of the same operator: relative to it and to its row."""
        rounding = self.case.unit * value.abs()
        return self.floor(self.relative * (value.abs() + 0.5 * self.row_size(value)) + rounding)

    def scaled_bound(self, gain: Tensor | float) -> Tensor:
        """What rounding may add to ``gain × ref``: the noise, scaled, and one more rounding of the product."""
        size = gain.abs() if isinstance(gain, Tensor) else abs(gain)
        return self.floor(size * (self.movable + self.case.unit * self.ref.abs()))

    @cached_property
    def sample(self) -> Tensor:
        """Flat indices of elements that are looked at first: those that are furthest off, and others."""
        ratio = ((self.bad - self.ref).abs() / self.bound).flatten()
        if len(ratio) <= 2 * _SAMPLE:
            return torch.arange(len(ratio))
        generator = torch.Generator().manual_seed(0)
        return torch.cat((ratio.topk(_SAMPLE).indices, torch.randint(len(ratio), (_SAMPLE,), generator=generator)))

    def sampled(self, tensor: Tensor) -> Tensor:
        """A tensor that broadcasts to the case's shape, at :attr:`sample`."""
        found: Tensor = tensor.expand(self.shape).reshape(-1)[self.sample]
        return found

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """Where the error is, along each axis and along two, wherever that is not everywhere."""
        _, H, D = self.shape
        masks = {
            "tokens": self.null.tokens[:, None, None],
            "heads": self.null.heads[None, :, None],
            "channels": self.null.channels.reshape(1, H, D),
        }
        some = {name: mask for name, mask in masks.items() if bool(mask.any()) and not bool(mask.all())}
        for other in ("heads", "channels"):
            if "tokens" in some and other in some:
                some[f"tokens × {other}"] = some["tokens"] & some[other]
        found = []
        for name, mask in some.items():
            if int(mask.expand(self.shape).sum()) < FEWEST:
                continue
            axes = name.split(" × ")
            where = {axis: self.indices(axis) for axis in axes}
            totals = {f"{axis}_total": int(getattr(self.null, axis).sum()) for axis in axes}
            counts = [counted(totals[f"{axis}_total"], axis) for axis in axes]
            listed = said("list.semicolon", parts=[said("list.comma", parts=where[axis][:8]) for axis in axes])
            words = said("fit.alone", counts=counts, listed=listed)
            found.append(Scope(mask, self.sampled(mask), {**where, **totals}, words))
        return tuple(found)

    def indices(self, axis: str) -> list[int]:
        """Indices of ``tokens``, ``heads`` or ``channels`` that are beyond the noise, at most :data:`LISTED`."""
        found = torch.nonzero(getattr(self.null, axis)).flatten()[:LISTED]
        chosen: list[int] = (self.rows[found] if axis == "tokens" else found).tolist()
        return chosen

    def accepts(self, value: Tensor, bound: Tensor) -> bool:
        """Whether rounding alone leads from ``value`` to what was recorded."""
        return not beyond(self.bad - value, bound, value, self.limits).any

    def energy(self, error: Tensor, everywhere: bool = False) -> float:
        """Sum of squares in units of the bound, over elements that are beyond the noise (all if none is)."""
        scaled = (error / self.bound).square()
        chosen = self.null.elements
        return float(scaled.sum() if everywhere or not bool(chosen.any()) else scaled[chosen].sum())

    def residual(self, value: Tensor, bound: Tensor) -> float:
        """Root mean square of what ``value`` leaves, in units of ``bound``."""
        return sqrt(float(((self.bad - value) / bound).square().mean()))
