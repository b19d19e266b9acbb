"""Who is nearer to the truth: each side's error against golden, checkpoint by checkpoint, whole and per channel.

Two right engines may round differently often. One that rounds after each of up to four operations where the other
rounds once is twice as far from the truth; measured between ``native`` and ``fp32-internal`` numerics in bfloat16:
0.52 to 1.58 over all checkpoints of both presets. :data:`FACTOR` is above that.

The error of a channel is a sum over rows. With ``n`` rows that count alike and do not know of each other, the logarithm
of the ratio of two such errors has a deviation of ``1 / sqrt(n)`` (each is the root of a chi square of ``n`` degrees,
whose logarithm has ``1 / sqrt(2 n)``). Rows do not count alike: ``n`` is the participation number ``(Σ s)² / Σ s²`` of
the squares ``s`` of the golden values in the channel, or of the nearer side's errors if that is less. A channel's limit
is :data:`FACTOR` ``× exp(Z / sqrt(n))``.

What is below one rounding of the dtype counts as one rounding: a copy has no error, and a side that rounded it once is
not infinitely further. Pure functions; the policy is data.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from align.checkpoints.bounds import unit_roundoff
from align.compare.metrics import SLICE_FLOOR, Metrics, join, measure_block
from align.compare.policy import CHANNEL_ROWS, TensorPolicy, layer_of

Nearer = Literal["alike", "candidate further", "reference further", "both further", "not observable"]
Array = NDArray[np.float64]
#: Channels that are named.
NAMED = 5


@dataclass(frozen=True)
class GoldenPolicy:
    """When a side is further from the truth than the other, apart from any result.

    Attributes:
        dtype, layers: of the model as the engines run it.
        factor: of two right sides' errors.
        z: deviations allowed to the logarithm of a channel's ratio, because very many are tested.
        expected: largest error of one side, in units of what rounding predicts for one side.
        rounding: relative L2 of one rounding, in units of the unit roundoff: ``sqrt(1/3)`` for an error that is uniform
            between the neighbours, times 0.68 for significands whose logarithms are uniform.
    """

    dtype: str
    layers: int
    factor: float = 2.5
    z: float = 6.0
    expected: float = 4.0
    rounding: float = 0.39

    @property
    def least(self) -> float:
        """Relative L2 of one rounding of the dtype."""
        return self.rounding * unit_roundoff(self.dtype)

    def limit(self, name: str) -> float:
        """Largest relative L2 against golden that rounding explains on one side."""
        two_sides = TensorPolicy.derived(self.dtype, self.layers)
        return min(two_sides.cap, self.expected * two_sides.predicted(layer_of(name)) / sqrt(2))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True)
class ChannelErrors:
    """One channel: flat canonical index, each side's relative L2 against golden, their ratio and its limit."""

    channel: int
    candidate: float
    reference: float
    factor: float
    limit: float

    @property
    def beyond(self) -> bool:
        return not 1 / self.limit <= self.factor <= self.limit


@dataclass(frozen=True)
class GoldenCheckpoint:
    """One checkpoint of both sides against golden.

    Attributes:
        name: the checkpoint.
        verdict: who is further.
        why: in words.
        candidate, reference: distance to golden; ``None`` if the side's values were not kept.
        factor: candidate's relative L2 over the reference's; ``None`` without both.
        expected: the largest that rounding explains on one side.
        rows: how many were compared.
        channels: those whose ratio is the largest part of its limit; first the worst.
    """

    name: str
    verdict: Nearer
    why: str
    candidate: Metrics | None = None
    reference: Metrics | None = None
    factor: float | None = None
    expected: float | None = None
    rows: int = 0
    channels: tuple[ChannelErrors, ...] = ()

    @property
    def departs(self) -> bool:
        return self.verdict not in ("alike", "not observable")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plain = asdict(self)
        for side in ("candidate", "reference"):
            metrics = getattr(self, side)
            plain[side] = None if metrics is None else metrics.to_dict()
        return plain


def judge(
    name: str, candidate: torch.Tensor, reference: torch.Tensor, golden: torch.Tensor, policy: GoldenPolicy
) -> GoldenCheckpoint:
    """Compare the same rows of three engines, each ``[N, *channels]``, floating.

    Raises:
        ValueError: the shapes differ, or a tensor holds integers.
    """
    if not golden.is_floating_point():
        raise ValueError("integers have no distance to the truth: they are equal or not")
    blocks = [measure_block(side, golden) for side in (candidate, reference)]
    left, right = (join([block]) for block in blocks)
    assert left.rel_l2 is not None and right.rel_l2 is not None
    factor = ratio(left.rel_l2, right.rel_l2, policy.least)
    rows = golden.shape[0]
    channels: tuple[ChannelErrors, ...] = ()
    if rows >= CHANNEL_ROWS:
        channels = _channels(candidate, reference, golden, policy)
    expected = policy.limit(name)
    verdict, why = _verdict(left.rel_l2, right.rel_l2, factor, expected, channels, policy)
    return GoldenCheckpoint(name, verdict, why, left, right, factor, expected, rows, channels)


def ratio(candidate: float, reference: float, least: float) -> float:
    """Of two errors, neither of which counts as less than ``least``; NaN is infinitely far."""
    one, other = (inf if value != value else max(value, least) for value in (candidate, reference))
    return 1.0 if one == other else one / other


def _verdict(
    candidate: float,
    reference: float,
    factor: float,
    expected: float,
    channels: tuple[ChannelErrors, ...],
    policy: GoldenPolicy,
) -> tuple[Nearer, str]:
    if not 1 / policy.factor <= factor <= policy.factor:
        side, times = ("candidate", factor) if factor > 1 else ("reference", 1 / factor)
        return _further(side), f"the {side} is {times:.3g} times as far from golden as the other side"
    off = [side for side, error in (("candidate", candidate), ("reference", reference)) if not error <= expected]
    if len(off) == 2:
        why = (
            f"both are further from golden than rounding explains: {candidate:.3g} and {reference:.3g} > {expected:.3g}"
        )
        return "both further", why
    if off:
        error = candidate if off[0] == "candidate" else reference
        return _further(off[0]), f"the {off[0]} is {error:.3g} from golden; rounding reaches {expected:.3g}"
    worst = channels[0] if channels else None
    if worst is not None and worst.beyond:
        side, times = ("candidate", worst.factor) if worst.factor > 1 else ("reference", 1 / worst.factor)
        count = sum(one.beyond for one in channels)
        more = "" if count == 1 else f", and {'at least ' if count == NAMED else ''}{count - 1} more"
        return _further(side), (
            f"channel {worst.channel} of the {side} is {times:.3g} times as far from golden as the other side's; "
            f"right ones reach {worst.limit:.3g}{more}"
        )
    return "alike", ""


def _further(side: str) -> Nearer:
    return "candidate further" if side == "candidate" else "reference further"


def _channels(
    candidate: torch.Tensor, reference: torch.Tensor, golden: torch.Tensor, policy: GoldenPolicy
) -> tuple[ChannelErrors, ...]:
    truth = golden.reshape(golden.shape[0], -1).float()
    errors = [side.reshape(truth.shape).float() - truth for side in (candidate, reference)]
    sums = [_sums(value) for value in (*errors, truth)]
    below = np.maximum(sums[2][0], SLICE_FLOOR**2 * float(np.median(sums[2][0])))
    with np.errstate(divide="ignore", invalid="ignore"):
        left, right = (
            np.nan_to_num(np.where(one == 0, 0.0, np.sqrt(one / below)), nan=inf, posinf=inf) for one, _ in sums[:2]
        )
        factors = np.maximum(left, policy.least) / np.maximum(right, policy.least)
        factors = np.where(left == right, 1.0, factors)
        nearer = np.where(left <= right, _participation(*sums[0]), _participation(*sums[1]))
        counting = np.minimum(nearer, _participation(*sums[2]))
        limits = policy.factor * np.exp(policy.z / np.sqrt(np.maximum(counting, 1.0)))
        excess = np.abs(np.log(factors)) / np.log(limits)
    worst = np.argsort(-excess, kind="stable")[:NAMED]
    return tuple(
        ChannelErrors(int(at), float(left[at]), float(right[at]), float(factors[at]), float(limits[at])) for at in worst
    )


def _sums(values: torch.Tensor) -> tuple[Array, Array]:
    """Sums over rows of the squares and of their squares, float64 ``[C]``."""
    squares = values.square().double()
    return squares.sum(0).numpy(), squares.square().sum(0).numpy()


def _participation(squares: Array, fourth: Array) -> Array:
    """How many rows make up a sum of squares; where there is nothing to sum, infinitely many."""
    return np.where(fourth > 0, squares**2 / np.where(fourth > 0, fourth, 1.0), inf)
