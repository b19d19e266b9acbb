"""What counts as noise between two sides' tensors: allowances derived from dtype and depth, or the seeds' thresholds.

A tensor that was carried through layers is off by the roundings before it. Errors that do not know of each other grow
with the root of their number: with about 10 roundings in a layer of 0.4 ulp each (:mod:`align.compare.noise` has the
same count), the relative L2 between two sides at layer ``l`` (from 0) is about ``0.4 ulp * sqrt(2 * 10 * (l + 1))``.

Measured between ``native`` and ``fp32-internal`` numerics, whose operators round differently but rightly, over all
checkpoints and layers of both presets (4 and 30 layers, prompts of 1, 7, 33 and 200 tokens) in bfloat16 and float16,
either side as the reference, in units of this prediction, by the number of rows:

=====  =====  =====  =======  ====
rows   whole  token  channel  head
=====  =====  =====  =======  ====
1      1.8    1.8    53       2.8
4      1.3    1.5    17       2.2
16     1.7    2.9    10.4     1.6
64     1.1    4.2    4.7      1.7
=====  =====  =====  =======  ====

The allowances are more than twice that: generous, because a right engine must never be accused. A small fault is not
found here but by the operator residual inside each worker. A channel of few rows is few elements, whose relative error
is arbitrary, so channels are judged from :data:`CHANNEL_ROWS` rows on.

A calibrated floor (:mod:`align.compare.floor`) narrows the allowances of the kinds that it knows, down to one rounding
of the dtype on each side and no further: what never differed in a few runs is not proved to be equal always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any, Literal

from align.checkpoints.table import parse
from align.compare.floor import METRICS, FloorRule
from align.compare.metrics import Metrics, Worst
from align.compare.noise import PRECISION
from align.sentences import Said, said

Judged = Literal["equal", "within", "beyond"]

#: Of one rounding, in units in the last place of 1.0.
ROUNDING_ULPS = 0.4
ROUNDINGS_PER_LAYER = 10
#: Fewest rows from which the worst channel is judged.
CHANNEL_ROWS = 64
#: Seeds 000, 001 (``max_rel < 1e-3`` in bf16, ``< 1e-2`` quantised) and 003 (about 1e-3).
SEED_MAX_REL = 1e-3
SEED_MAX_REL_QUANTISED = 1e-2


@dataclass(frozen=True)
class Allowance:
    """Largest relative L2 that is noise, for the whole tensor and its slices."""

    whole: float
    token: float
    channel: float
    head: float


@dataclass(frozen=True)
class TensorPolicy:
    """How carried tensors are judged, apart from any result.

    Attributes:
        name: ``derived`` judges by relative L2, ``seed`` by the seeds' thresholds alone.
        dtype: of the model.
        layers: how many the model has; what stands behind the last is judged as one layer more.
        whole, token, channel, head: allowances in units of the prediction.
        cap, slice_cap: relative L2 that is never noise, for the whole and for a slice, however deep.
        max_rel: the seeds' threshold, always computed and shown.
        cosine: least cosine of the seeds; ``None``, because they ask for the number and give no limit.
        floor: what was calibrated; ``None`` judges by the derived allowances alone.
    """

    name: Literal["derived", "seed"]
    dtype: str
    layers: int = 1
    whole: float = 4.0
    token: float = 12.0
    channel: float = 12.0
    head: float = 6.0
    cap: float = 0.5
    slice_cap: float = 0.75
    max_rel: float = SEED_MAX_REL
    cosine: float | None = None
    floor: FloorRule | None = None

    def __post_init__(self) -> None:
        if self.name not in ("derived", "seed"):
            raise ValueError(f"unknown policy {self.name!r}; valid: derived, seed")
        if self.dtype not in PRECISION:
            raise ValueError(f"unknown dtype {self.dtype!r}; valid: {', '.join(PRECISION)}")

    @classmethod
    def derived(cls, dtype: str, layers: int = 1, quantised: bool = False) -> TensorPolicy:
        """Allowances from dtype and depth; the default."""
        return cls("derived", dtype, layers, max_rel=SEED_MAX_REL_QUANTISED if quantised else SEED_MAX_REL)

    @classmethod
    def seed(cls, dtype: str, layers: int = 1, quantised: bool = False) -> TensorPolicy:
        """The seeds' thresholds alone."""
        return cls("seed", dtype, layers, max_rel=SEED_MAX_REL_QUANTISED if quantised else SEED_MAX_REL)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TensorPolicy:
        floor = plain.get("floor")
        return cls(**{**plain, "floor": None if floor is None else FloorRule.from_dict(floor)})

    def without_floor(self) -> TensorPolicy:
        """For numbers that a floor was not calibrated for."""
        return replace(self, floor=None)

    def judged_by(self, name: str) -> str:
        """What a checkpoint's carried tensors are judged by, in words."""
        if self.name == "seed":
            return "the seeds' thresholds"
        known = self.floor is not None and any(self.floor.limit(kind_of(name), one) is not None for one in METRICS)
        return self.floor.words if known and self.floor is not None else "derived"

    def predicted(self, layer: int | None) -> float:
        """Relative L2 between two right sides at a layer; ``None`` is behind the last."""
        depth = self.layers + 1 if layer is None else layer + 1
        rounding = ROUNDING_ULPS * 2.0 ** (1 - PRECISION[self.dtype])
        return float(rounding * sqrt(2 * ROUNDINGS_PER_LAYER * depth))

    def allowance(self, name: str) -> Allowance:
        """For a checkpoint; one that is not in the table is judged as if it stood behind the last layer."""
        predicted = self.predicted(layer_of(name))
        derived = Allowance(
            whole=min(self.cap, self.whole * predicted),
            token=min(self.slice_cap, self.token * predicted),
            channel=min(self.slice_cap, self.channel * predicted),
            head=min(self.slice_cap, self.head * predicted),
        )
        return derived if self.floor is None else self._calibrated(name, derived, predicted, self.floor)

    def _calibrated(self, name: str, derived: Allowance, predicted: float, floor: FloorRule) -> Allowance:
        kind, limits = kind_of(name), asdict(derived)
        rounding = ROUNDING_ULPS * 2.0 ** (1 - PRECISION[self.dtype]) * sqrt(2)
        for metric in METRICS:
            calibrated = floor.limit(kind, metric)
            if calibrated is not None:
                most = (self.cap if metric == "whole" else self.slice_cap) if floor.wider else limits[metric]
                limits[metric] = min(most, max(calibrated * predicted, rounding))
        return Allowance(**limits)

    def seed_passes(self, metrics: Metrics) -> bool | None:
        """Whether the seeds' thresholds accept the pair; ``None`` if the numbers are not known (digests alone)."""
        if metrics.equal:
            return True
        if metrics.max_rel is None:
            return False if metrics.rel_l2 is None else None  # integers differ; an estimate knows no largest error
        enough = self.cosine is None or (metrics.cosine is not None and metrics.cosine >= self.cosine)
        return metrics.max_rel < self.max_rel and enough

    def judge(self, name: str, metrics: Metrics, rows: int, token: Said | None = None) -> tuple[Judged, Said]:
        """The verdict on a pair of ``rows`` rows, and its reason; ``token`` says what the worst row is."""
        if metrics.equal:
            return "equal", said("carried.equal")
        if metrics.rel_l2 is None:
            return "beyond", said("carried.rows", count=metrics.rows_total, rows=rows)
        if self.name == "seed":
            return self._judge_seed(metrics)
        allowed = self.allowance(name)
        heads, channels = metrics.worst_head, metrics.worst_channel if rows >= CHANNEL_ROWS else None
        slices: list[tuple[Said | None, Worst | None, float]] = [
            (token or _numbered("carried.row", metrics.worst_token), metrics.worst_token, allowed.token),
            (_numbered("operator.head", heads), heads, allowed.head),
            (_numbered("operator.channel", channels), channels, allowed.channel),
        ]
        found: list[tuple[Said | None, float, float]] = [(None, metrics.rel_l2, allowed.whole)]
        found += [(what, worst.rel_l2, limit) for what, worst, limit in slices if worst]
        # Written so that NaN is beyond.
        over = [
            said("carried.l2", value=value, limit=limit)
            if what is None
            else said("carried.l2_of", subject=what, value=value, limit=limit)
            for what, value, limit in found
            if not value <= limit
        ]
        if over:
            by = self.judged_by(name)
            return "beyond", said("list.semicolon", parts=over) if by == "derived" else said(
                "carried.by", parts=over, by=by
            )
        return "within", said("carried.within", value=metrics.rel_l2, limit=allowed.whole)

    def _judge_seed(self, metrics: Metrics) -> tuple[Judged, Said]:
        passes = self.seed_passes(metrics)
        if metrics.max_rel is None:
            return "beyond", said("carried.seed_digests")
        sign = "<" if metrics.max_rel < self.max_rel else "≥"
        about = {"value": metrics.max_rel, "sign": sign, "limit": self.max_rel}
        if self.cosine is None:
            return ("within" if passes else "beyond"), said("carried.seed", **about)
        words = said("carried.seed_cosine", **about, cosine=metrics.cosine, least=self.cosine)
        return ("within" if passes else "beyond"), words


def _numbered(key: str, worst: Worst | None) -> Said | None:
    return None if worst is None else said(key, index=worst.index)


def layer_of(name: str) -> int | None:
    """The layer of a checkpoint for judging: 0 for the embedding, ``None`` behind the last layer and for strangers."""
    try:
        parsed = parse(name)
    except ValueError:
        return None
    return 0 if parsed.kind.name == "embed" else parsed.layer


def kind_of(name: str) -> str:
    """The kind of a checkpoint; of a stranger its own name."""
    try:
        return parse(name).kind.name
    except ValueError:
        return name
