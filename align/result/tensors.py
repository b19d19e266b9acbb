"""Coverage and tensors of a result, in short, and how they are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import inf, isfinite
from typing import Any, Literal

from pydantic import Field

from align.compare.checkpoint import CheckpointComparison
from align.compare.coverage import Coverage as Covered
from align.compare.routes import Flip, routers_told
from align.compare.tensors import TensorComparison
from align.result.cells import CallSite, Cell, DriftPoint, cells_of, drift_of, sites_of
from align.result.parts import Documented, Number
from align.result.plain import plain
from align.run.report import Report

#: Accused checkpoints whose numbers are shown.
_SHOWN = 8


class Seen(Documented):
    """Checkpoints seen of checkpoints that the model has."""

    expected: int
    """How many the model has."""
    observed: int
    """How many were seen in every step and on every rank."""
    percent: float
    """0 to 100."""
    missing: list[str]
    """Seen nowhere."""
    partial: list[str]
    """Not seen in some step or on some rank."""
    why: dict[str, str]
    """Reasons by name, where they are known."""


class Coverage(Documented):
    """How much was looked at. What was not is no pass."""

    candidate: Seen
    """What the candidate recorded."""
    reference: Seen
    """What the reference recorded."""
    paired: Seen
    """What was compared."""
    demanded: float | None = None
    """Percent without which nothing is called aligned; null if none was demanded."""


class CheckpointNumbers(Documented):
    """One checkpoint's distance between the sides. Null is not known, as of digests alone."""

    name: str
    """The checkpoint, or what a hand-written file is called."""
    verdict: Literal["equal", "within", "beyond", "not observable", "not comparable"]
    """By the policy in use."""
    inputs: Literal["equal", "within", "beyond", "unknown"]
    """What its inputs are."""
    why: str
    """Reason, with number and bound."""
    rows: int
    """Rows that were compared: one per request and position."""
    estimated: bool
    """From random projections, because a side kept no values."""
    max_abs: Number | None
    """Largest absolute difference of an element."""
    max_rel: Number | None
    """Largest relative difference of an element, in float32, denominator at least 1e-8 (seed 003)."""
    max_rel_bound: float
    """The seeds' threshold for it."""
    seed: bool | None
    """Whether the seeds' threshold accepts it."""
    cosine: Number | None
    """Of the two tensors as vectors; the seeds give no limit."""
    rel_l2: Number | None
    """Norm of the difference over the norm of the reference."""
    rel_l2_bound: float
    """What the policy allows: the derived bound at that depth, or the calibrated floor."""


class Floor(Documented):
    """A calibrated floor: how far right engines were apart in clean runs, which ``align calibrate`` measured."""

    name: str
    """Of the floor."""
    simulated: bool
    """Calibrated on a simulated device, which says nothing about real kernels."""
    factor: float
    """On all of its limits; 1 unless it was calibrated in other circumstances."""
    why: str
    """Of the factor; empty for 1."""
    wider: bool
    """Whether its limits may exceed the derived bounds: a simulated floor on hardware."""
    judged: int
    """Checkpoints that it judged; the others were judged by derived bounds."""


class LayerCounts(Documented):
    """The checkpoints of one layer, or those outside of layers, by verdict."""

    layer: int | None
    """Its number; null for what is in front of the first layer and behind the last."""
    total: int
    """Checkpoints of it."""
    equal: int
    """Equal bit by bit."""
    within: int
    """Different by what rounding explains."""
    beyond: int
    """Different by more; the rest was not compared."""


class RouterFlip(Documented):
    """A near-tie of a router: the sides chose different experts whose scores are as near as rounding makes them."""

    layer: int
    """Where it is; the checkpoint is ``layers.LAYER.moe.topk_ids``."""
    request: str
    """Of the token."""
    position: int
    """Of the token."""
    step: int
    """In which the candidate computed it."""
    phase: str
    """Of that step: ``prefill``, ``decode`` or ``mixed``."""
    candidate: list[int]
    """Experts that the candidate alone chose."""
    reference: list[int]
    """Experts that the reference alone chose."""
    gaps: dict[str, Number]
    """By side: by how much its best score beats the other side's choice, of the score's own size."""
    swing: Number
    """By how much the difference of the two choices' logits changes from side to side."""
    noise: Number
    """By how much that of two other logits of the token does."""
    behind: int
    """Rows behind it: its own, and from the next attention on the later ones of its request."""
    replayed: bool
    """Both sides used the same experts all the same, so that these rows were compared."""


class RowsBehind(Documented):
    """Rows behind near-ties of routers at the end of the model."""

    reached: int
    """How many there are."""
    behind: int
    """How many of them were not compared."""
    rows: int
    """Of how many paired rows."""
    replayed: str
    """The side that used the other one's choice of experts; empty if none did."""


class Tensors(Documented):
    """The comparison of tensors in short."""

    policy: Literal["derived", "seed"]
    """What judges: allowances derived from dtype and depth, or the seeds' thresholds alone."""
    floor: Floor | None = None
    """The floor that narrows the derived allowances; null if these judge alone."""
    counts: dict[str, int]
    """Checkpoints by verdict."""
    layers: list[LayerCounts] = Field(default_factory=list)
    """The same layer by layer, layer 0 first; empty in results of an earlier version."""
    rows: int
    """Paired rows: one per request and position. Of files that are compared by name, as many as the longest has."""
    estimated: int = 0
    """Checkpoints of which digests alone were compared, so that their distance is an estimate."""
    estimated_rows: int | None = None
    """Rows of which there are digests: those of the one that has most; null without such checkpoints."""
    first_divergence: str | None
    """The first checkpoint, layer 0 first, that rounding does not explain."""
    beyond: list[str]
    """All of these, in order."""
    shown: list[CheckpointNumbers]
    """The accused ones, the first divergence, and the one that is furthest apart."""
    notes: list[str]
    """What could not be checked."""
    flips: list[RouterFlip] = Field(default_factory=list)
    """Near-ties of routers in order of layers; empty in results of an earlier version."""
    routing: RowsBehind | None = None
    """What lies behind them; null without near-ties."""
    routers: list[dict[str, Any]] = Field(default_factory=list)
    """The same as sentences: the first near-ties, and what came of the rows behind them."""
    cells: list[Cell] = Field(default_factory=list)
    """Every checkpoint with its scale, layer 0 first; empty in results of an earlier version."""
    drift: list[DriftPoint] = Field(default_factory=list)
    """The residual stream layer by layer; empty likewise."""
    sites: list[CallSite] = Field(default_factory=list)
    """Where the sides make the checkpoints; empty likewise, and of recordings without calls."""


def coverage_of(report: Report) -> Coverage | None:
    """``None`` without tensors."""
    if report.tensors is None:
        return None
    seen = {part: _seen(covered) for part, covered in report.tensors.coverage.items()}
    return Coverage(
        candidate=seen["candidate"], reference=seen["reference"], paired=seen["paired"], demanded=report.min_coverage
    )


def _seen(covered: Covered) -> Seen:
    return Seen(
        expected=covered.expected,
        observed=covered.observed,
        percent=covered.percent,
        missing=list(covered.missing),
        partial=list(covered.partial),
        why=dict(covered.why),
    )


def tensors_of(report: Report) -> Tensors | None:
    """``None`` if none were compared."""
    compared = report.tensors
    if compared is None:
        return None
    first = compared.first_divergence
    names = [finding.checkpoint or finding.evidence.get("name") for finding in report.findings]
    chosen = [compared.get(name) for name in names if name is not None] + [first, furthest(compared)]
    shown = list({one.name: one for one in chosen if one is not None}.values())[:_SHOWN]
    estimated = [one for one in compared.checkpoints if one.estimated]
    return Tensors(
        estimated=len(estimated),
        estimated_rows=max((one.rows for one in estimated), default=None),
        policy=compared.policy.name,
        floor=_floor(compared),
        layers=_layers(compared),
        counts=dict(sorted(Counter(one.verdict for one in compared.checkpoints).items())),
        rows=len(compared.pairing.rows) or max((one.rows for one in compared.checkpoints), default=0),
        first_divergence=None if first is None else first.name,
        beyond=[one.name for one in compared.checkpoints if one.verdict == "beyond"],
        shown=[numbers(compared, one) for one in shown],
        notes=list(compared.notes),
        flips=[_flip(one) for one in compared.flips],
        routing=None if compared.routing is None else RowsBehind(**asdict(compared.routing)),
        routers=routers_told(compared.flips, compared.routing),
        cells=cells_of(compared),
        drift=drift_of(compared),
        sites=sites_of(compared),
    )


def _flip(one: Flip) -> RouterFlip:
    return RouterFlip(
        layer=one.layer,
        request=one.row.request,
        position=one.row.position,
        step=one.step,
        phase=one.phase,
        candidate=list(one.candidate),
        reference=list(one.reference),
        gaps={side: plain(gap) for side, gap in one.gaps.items()},
        swing=plain(one.swing),
        noise=plain(one.noise),
        behind=one.behind,
        replayed=one.replayed,
    )


def _layers(compared: TensorComparison) -> list[LayerCounts]:
    by_layer: dict[int | None, Counter[str]] = {}
    for one in compared.checkpoints:
        by_layer.setdefault(one.layer, Counter())[one.verdict] += 1
    return [
        LayerCounts(
            layer=layer, total=found.total(), equal=found["equal"], within=found["within"], beyond=found["beyond"]
        )
        for layer, found in sorted(by_layer.items(), key=lambda item: (item[0] is None, item[0] or 0))
    ]


def _floor(compared: TensorComparison) -> Floor | None:
    floor = compared.policy.floor
    if floor is None:
        return None
    judged = [one.name for one in compared.checkpoints if one.compared and not one.estimated]
    count = sum(compared.policy.judged_by(name) == floor.words for name in judged)
    return Floor(
        name=floor.name, simulated=floor.simulated, factor=floor.factor, why=floor.why, wider=floor.wider, judged=count
    )


def furthest(compared: TensorComparison) -> CheckpointComparison | None:
    """The checkpoint whose relative L2 is the largest part of its bound; ``None`` if none was measured."""

    def distance(one: CheckpointComparison) -> float:
        assert one.metrics is not None and one.metrics.rel_l2 is not None
        found = one.metrics.rel_l2 / compared.policy.allowance(one.name).whole
        return found if isfinite(found) else inf

    measured = [one for one in compared.checkpoints if one.metrics is not None and one.metrics.rel_l2 is not None]
    return max(measured, key=distance, default=None)


def numbers(compared: TensorComparison, one: CheckpointComparison) -> CheckpointNumbers:
    """One checkpoint's numbers with their bounds."""
    metrics = one.metrics
    return CheckpointNumbers(
        name=one.name,
        verdict=one.verdict,
        inputs=one.inputs_state,
        why=one.why,
        rows=one.rows,
        estimated=one.estimated,
        max_abs=None if metrics is None else plain(metrics.max_abs),
        max_rel=None if metrics is None else plain(metrics.max_rel),
        max_rel_bound=compared.policy.max_rel,
        seed=one.seed,
        cosine=None if metrics is None else plain(metrics.cosine),
        rel_l2=None if metrics is None else plain(metrics.rel_l2),
        rel_l2_bound=compared.policy.allowance(one.name).whole,
    )
