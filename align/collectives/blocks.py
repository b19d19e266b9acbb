"""What explains a tensor that differs from the other side's where its inputs agree, and ranks hold parts of it.

Each rank's part consists of blocks: heads, or its piece of the vocabulary or of the intermediate axis. A block that is
not like the other side's in its own place but like another one names the map that is wrong. Blocks of two sides differ
by noise, so that the nearest one is taken, and it fits if it leaves far less than the block's own place does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from align.collectives.hypotheses import DOUBLED, MISSING, Tried
from align.sentences import said

Tensor = torch.Tensor
#: What a fit may leave, relative L2: more than the noise that clean sides carry (0.03, design §5), far less than 1.
_LEFT = 0.1
#: Of what is left without the hypothesis.
_SHARE = 0.25
_SMALL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Mapped:
    """Blocks of this side that are like other blocks of the other side.

    Attributes:
        order: for each block the one of the other side that it is nearest to.
        before, after: relative L2 of the whole to the other side's, as it is and with the blocks so.
    """

    order: tuple[int, ...]
    before: float
    after: float

    @property
    def fits(self) -> bool:
        """Whether another order than the own explains it."""
        moved = self.order != tuple(range(len(self.order)))
        return moved and self.after <= _LEFT and self.after <= _SHARE * self.before


def block_map(ours: Tensor, theirs: Tensor, count: int) -> Mapped | None:
    """Match the blocks along the second axis.

    Args:
        ours, theirs: ``[rows, channels, …]`` of one shape, rows in one order.
        count: blocks of the second axis.

    Returns:
        ``None`` if the axis does not divide so, or a value is not finite.
    """
    if ours.shape != theirs.shape or ours.dim() < 2 or count < 2 or ours.shape[1] % count:
        return None
    mine, other = (
        one.float().reshape(len(one), count, -1).transpose(0, 1).reshape(count, -1) for one in (ours, theirs)
    )
    if not bool(mine.isfinite().all() and other.isfinite().all()):
        return None
    distance = torch.cdist(mine.double(), other.double())
    own, best = distance.diagonal(), distance.min(1)
    order = torch.where(own <= best.values * (1 + 1e-6), torch.arange(count), best.indices)
    size = float(other.norm().clamp_min(_SMALL))
    expected = other[order]
    after = float((mine - expected).norm() / expected.norm().clamp_min(_SMALL))
    return Mapped(tuple(order.tolist()), float((mine - other).norm()) / size, after)


def ratio_to(ours: Tensor, theirs: Tensor, size: int) -> Tried:
    """Whether a tensor is ``size`` times the other side's, as after a reduce that was done twice."""
    a, b = ours.float(), theirs.float()
    if a.shape != b.shape or not bool(a.isfinite().all() and b.isfinite().all()):
        return Tried(DOUBLED, "not observable", said("hypothesis.not_finite"))
    ratio = float((a * b).sum() / (b * b).sum().clamp_min(_SMALL))
    left = float((a - ratio * b).norm() / a.norm().clamp_min(_SMALL))
    fits = abs(ratio - size) <= _LEFT * size / 2 and left <= _LEFT
    key = "hypothesis.doubled" if fits else "hypothesis.not_doubled"
    what = said(key, ratio=ratio, size=size, residual=left)
    return Tried(DOUBLED, "fits" if fits else "refuted", what, left, (), {"ratio": ratio, "size": size})


def summed(parts: dict[int, Tensor], theirs: Tensor) -> Tried:
    """Whether what the ranks hold, which should be alike, adds up to the other side's tensor: the reduce is missing."""
    if any(part.shape != theirs.shape for part in parts.values()):
        return Tried(MISSING, "not observable", said("hypothesis.no_other"))
    total = torch.stack([part.float() for part in parts.values()]).sum(0)
    size = theirs.float().norm().clamp_min(_SMALL)
    left = float((total - theirs.float()).norm() / size)
    before = min(float((part.float() - theirs.float()).norm() / size) for part in parts.values())
    fits = left <= _LEFT and left <= _SHARE * before
    key = "hypothesis.sum_matches" if fits else "hypothesis.sum_differs"
    what = said(key, ranks=list(parts), residual=left, before=before)
    numbers = {"residual_of_sum": left, "residual_of_rank": before}
    return Tried(MISSING, "fits" if fits else "refuted", what, left, tuple(parts) if fits else (), numbers)
