"""Whether what tensor parallelism sums up over the ranks is the sum of what the ranks gave, on one side.

The ranks' summands (``attn.o_partial``, ``mlp.down_partial``) and every rank's result are in the trace. A reduce in the
model's dtype adds ``tp`` numbers in some order: ``tp - 1`` additions, each rounded once, of sums that are never larger
than ``sum |summand|``. So an element is off from the sum in float32 by at most ``(tp - 1) u`` of that magnitude, and
less if the kernel adds in float32 and rounds at the end. All ranks must hold the same result bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from align.checkpoints.recompute import tiny
from align.checkpoints.table import Name, Structure
from align.compare.bits import same_bits
from align.compare.reasons import place_said
from align.compare.residual import ResidualPolicy, ResidualVerdict
from align.compare.rows import Recorded, ranks_of, real_steps
from align.sentences import said, text_of
from align.trace.format import StepEntry

OPERATOR = "all_reduce"
#: Of the dtype's largest number: a sum whose magnitude reaches it may be recorded as infinite.
_OVERFLOW = 0.998
_Judged = tuple[str, int, ResidualVerdict]


def judge_reduces(trace: Recorded, structure: Structure, policy: ResidualPolicy) -> dict[str, list[_Judged]]:
    """``(phase, rank, verdict)`` of every result of a reduce, by checkpoint; empty without tensor parallelism.

    Values that were not recorded, or cannot be read, are ``not observable`` with the reason.
    """
    if structure.tp == 1:
        return {}
    entries = real_steps(trace)
    phases = dict.fromkeys(entry.phase for entry in entries)
    found: dict[str, list[_Judged]] = {}
    for name in structure.names():
        if structure.operator(name.kind) == OPERATOR:
            found[str(name)] = [
                one
                for phase in phases
                for one in _judge(trace, name, [entry for entry in entries if entry.phase == phase], structure, policy)
            ]
    return found


def judge_step(
    trace: Recorded, name: Name, entry: StepEntry, structure: Structure, policy: ResidualPolicy
) -> ResidualVerdict | None:
    """The worst rank of one reduce in one step; ``None`` if it has no values, or no reduce makes this checkpoint."""
    if structure.tp == 1 or structure.operator(name.kind) != OPERATOR:
        return None
    judged = [verdict for _, _, verdict in _judge(trace, name, [entry], structure, policy)]
    known = [verdict for verdict in judged if verdict.verdict != "not observable"]
    return next((one for one in known if one.verdict == "beyond"), known[0] if known else None)


def _judge(
    trace: Recorded, name: Name, entries: Sequence[StepEntry], structure: Structure, policy: ResidualPolicy
) -> Iterator[_Judged]:
    """One phase, rank by rank."""
    (source,) = structure.inputs(name)
    worst: dict[int, ResidualVerdict] = {}
    why = ""
    for entry in entries:
        try:
            group = ranks_of(trace, entry.step)
            parts = {rank: trace.tensor(rank, entry.step, str(source)) for rank in group}
            results = {rank: trace.tensor(rank, entry.step, str(name)) for rank in group}
        except ValueError as error:
            why = str(error)
            continue
        why = _lacking(structure, name, source, parts, results) or why
        summands = [part for part in parts.values() if part is not None]
        values = {rank: value for rank, value in results.items() if value is not None}
        if len(summands) != structure.tp or not values:
            continue
        if len({part.shape for part in (*summands, *values.values())}) > 1:
            why = f"step {entry.step}: the ranks' parts of {source} and {name} have different shapes"
            continue
        for rank, verdict in _step(str(name), entry, summands, values, policy).items():
            worst[rank] = worse(worst[rank], verdict) if rank in worst else verdict
    for rank in sorted({rank for entry in entries for rank in ranks_of(trace, entry.step)}):
        yield (
            entries[0].phase,
            rank,
            worst.get(rank) or ResidualVerdict(str(name), OPERATOR, "not observable", why),
        )


def _lacking(
    structure: Structure,
    name: Name,
    source: Name,
    parts: dict[int, torch.Tensor | None],
    results: dict[int, torch.Tensor | None],
) -> str:
    if len(parts) != structure.tp:
        return f"{len(parts)} of {structure.tp} ranks are in the trace"
    for what, values in ((source, parts), (name, results)):
        without = [str(rank) for rank, value in values.items() if value is None]
        if without:
            return f"the values of {what} were not recorded on rank {', '.join(without)}"
    return ""


def _step(
    name: str,
    entry: StepEntry,
    summands: Sequence[torch.Tensor],
    values: dict[int, torch.Tensor],
    policy: ResidualPolicy,
) -> dict[int, ResidualVerdict]:
    stacked = torch.stack([part.float() for part in summands])
    total, size = stacked.sum(0), stacked.abs().sum(0)
    return judge_sum(name, OPERATOR, entry, Sum(total, size, len(summands) - 1.0), values, policy)


@dataclass(frozen=True)
class Sum:
    """What ranks should hold: float32 ``[rows, …]``, its magnitude, and the roundings of it that are possible."""

    total: torch.Tensor
    size: torch.Tensor
    roundings: float


def judge_sum(
    name: str,
    operator: str,
    entry: StepEntry,
    expected: Sum,
    values: dict[int, torch.Tensor],
    policy: ResidualPolicy,
) -> dict[int, ResidualVerdict]:
    """What each rank holds of one step against the sum, and against the first rank."""
    rows = [(span.request, at) for span in entry.rows for at in range(span.start, span.start + span.count)]
    total, size = expected.total, expected.size
    dtype = next(iter(values.values())).dtype
    magnitude = size + tiny(dtype)
    allowed = expected.roundings * policy.slack
    limit = torch.finfo(dtype).max * _OVERFLOW
    first = next(iter(values))
    found = {}
    for rank, value in values.items():
        wide = value.float()
        excused = ~total.isfinite() | (wide.isinf() & (size >= limit))
        bad = ~wide.isfinite() & ~excused
        ratio = ((wide - total).abs() / (policy.unit * magnitude)).masked_fill(excused | bad, 0.0)
        flat = (bad if bool(bad.any()) else ratio).float().flatten()
        index = int(flat.argmax()) if flat.numel() else 0
        width = max(1, value[0].numel()) if len(value) else 1
        row, channel = divmod(index, width)
        row_name = rows[row] if row < len(rows) == len(value) else None
        largest, non_finite = float(ratio.max()) if flat.numel() else 0.0, int(bad.sum())
        at = said("place.at", place=place_said(row_name), channel=channel)
        reasons = []
        if non_finite:
            reasons.append(said("reduce.not_finite", count=non_finite, at=at))
        elif not largest <= allowed:
            numbers = {
                "value": _of(wide, row, channel),
                "total": _of(total, row, channel),
                "ratio": largest,
                "allowed": allowed,
            }
            reasons.append(said("reduce.sum", rank=rank, **numbers, at=at))
        if rank != first and not same_bits(value, values[first]):
            differing = (value != values[first]).flatten(1).any(1).nonzero()[:1, 0].tolist() if value.dim() > 1 else []
            named = rows[differing[0]] if differing and len(rows) == len(value) else None
            row_name = row_name if reasons else named
            reasons.append(said("reduce.unequal", first=first, rank=rank, place=place_said(named)))
        found[rank] = ResidualVerdict(
            name,
            operator,
            "beyond" if reasons else "within",
            "; ".join(map(text_of, reasons)),
            rows=len(value),
            ratio=largest,
            allowed=allowed,
            row=row,
            channel=channel,
            row_name=row_name,
            non_finite=non_finite,
            reasons=tuple(reasons),
            requests=() if row_name is None or not reasons else (row_name[0],),
        )
    return found


def _of(values: torch.Tensor, row: int, channel: int) -> str:
    return f"{float(values[row].flatten()[channel]):.5g}"


def worse(one: ResidualVerdict, other: ResidualVerdict) -> ResidualVerdict:
    """The one that is beyond, of two alike the one with the larger error; rows of both."""
    if one.verdict == other.verdict:
        chosen = other if other.ratio > one.ratio else one
    else:
        chosen = one if one.verdict == "beyond" else other
    return ResidualVerdict(**{**chosen.__dict__, "rows": one.rows + other.rows})
