"""Coverage and tensors of a result, in short."""

from __future__ import annotations

from collections import Counter
from math import inf, isfinite

from align.compare.checkpoint import CheckpointComparison
from align.compare.coverage import Coverage as Covered
from align.compare.tensors import TensorComparison
from align.result.parts import CheckpointNumbers, Coverage, Floor, Seen, Tensors
from align.result.plain import plain
from align.run.report import Report

#: Accused checkpoints whose numbers are shown.
_SHOWN = 8


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
    return Tensors(
        policy=compared.policy.name,
        floor=_floor(compared),
        counts=dict(sorted(Counter(one.verdict for one in compared.checkpoints).items())),
        rows=len(compared.pairing.rows) or max((one.rows for one in compared.checkpoints), default=0),
        first_divergence=None if first is None else first.name,
        beyond=[one.name for one in compared.checkpoints if one.verdict == "beyond"],
        shown=[numbers(compared, one) for one in shown],
        notes=list(compared.notes),
    )


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
