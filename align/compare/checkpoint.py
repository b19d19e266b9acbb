"""Compares one checkpoint of two traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from align.compare.added import Added
from align.compare.alike import Alike
from align.compare.bits import same_bits
from align.compare.estimate import estimate, joined_digest
from align.compare.gather import Gathered, gather, is_head, reconcile
from align.compare.metrics import Metrics, identical, join, measure_block
from align.compare.pairing import Pairing
from align.compare.policy import Judged, TensorPolicy
from align.compare.rows import CANDIDATE, REFERENCE, PairedRow, Place, Recorded, RowKey, real_steps
from align.compare.spread import Spread, spread_of
from align.sentences import Said, said, text_of

Verdict = Literal["equal", "within", "beyond", "not observable", "not comparable"]
SLOTS = "attn.kv_start_indices"


@dataclass(frozen=True)
class CheckpointComparison:
    """One checkpoint on both sides.

    Attributes:
        name: the checkpoint, or what a hand-written file is called.
        verdict: of the carried tensors.
        why: its reason, in words.
        layer, kind: of the checkpoint; ``None`` and the name itself for what is not in the table.
        metrics: over all paired rows; ``None`` if there was nothing to compare.
        phases: over the rows of each phase, unless the tensors are equal.
        rows: how many were compared.
        rows_missing: paired rows that a side did not record, by side.
        worst: the worst token's row on both sides; for integers the first that differs.
        estimated: from digests, because a side has no values.
        seed: whether the seeds' thresholds accept it; ``None`` if that is not known.
        added: by side, what the operator itself added.
        inputs: names of what the operator reads, with their verdicts; ``None`` if it is not known what it reads.
        wrong_slots: by side, rows whose cache slot does not belong to the row's position.
        note: shapes that were reconciled and the like.
        alike_row: the worst row with equal inputs whose result differs by more than the operator's roundings.
        nonfinite_row: the first row in which both sides are not finite in the same elements.
        said: of ``beyond``: ``why``, as data.
        wrong_side: of a choice of experts: the side alone whose own logits refute it.
        spread: of the distance over rows, steps and channels; ``None`` of equal tensors, integers and digests.
        shape: of the compared tensors, the rows first; empty if there were none, or digests alone.
        dtypes: by side, as recorded.
    """

    name: str
    verdict: Verdict
    why: str
    layer: int | None = None
    kind: str = ""
    metrics: Metrics | None = None
    phases: Mapping[str, Metrics] = field(default_factory=dict)
    rows: int = 0
    rows_missing: Mapping[str, int] = field(default_factory=dict)
    worst: PairedRow | None = None
    estimated: bool = False
    seed: bool | None = None
    added: Mapping[str, Added] = field(default_factory=dict)
    inputs: tuple[tuple[str, Verdict], ...] | None = None
    wrong_slots: Mapping[str, tuple[RowKey, ...]] = field(default_factory=dict)
    note: str = ""
    alike_row: RowKey | None = None
    nonfinite_row: RowKey | None = None
    said: Said | None = None
    wrong_side: str | None = None
    spread: Spread | None = None
    shape: tuple[int, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def compared(self) -> bool:
        """Whether there is a verdict on values."""
        return self.verdict in ("equal", "within", "beyond")

    @property
    def inputs_state(self) -> Literal["equal", "within", "beyond", "unknown"]:
        """The worst verdict of the inputs, ``unknown`` if one was not compared; token ids count as equal."""
        if self.inputs is None:
            return "unknown"
        verdicts = {verdict for _, verdict in self.inputs}
        if "beyond" in verdicts:
            return "beyond"
        if not verdicts <= {"equal", "within"}:
            return "unknown"
        return "within" if "within" in verdicts else "equal"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plain = asdict(replace(self, metrics=None, phases={}, spread=None))
        plain["spread"] = None if self.spread is None else self.spread.to_dict()
        plain["metrics"] = None if self.metrics is None else self.metrics.to_dict()
        plain["phases"] = {phase: metrics.to_dict() for phase, metrics in self.phases.items()}
        return {**plain, "inputs_state": self.inputs_state}


def compare_checkpoint(
    name: str,
    candidate: Recorded,
    reference: Recorded,
    pairing: Pairing,
    policy: TensorPolicy,
    alike: Alike | None = None,
    behind: torch.Tensor | None = None,
) -> CheckpointComparison:
    """Compare one checkpoint; layer, inputs and residuals are not filled in.

    ``alike`` knows the rows that were equal in the checkpoints before this one, ``behind`` (bool ``[paired rows]``)
    those that are left out because a near-tie of a router lies before them.

    Raises:
        ValueError: a record is damaged or the shapes differ; says which.
    """
    if pairing.by_order:
        return _compare_by_order(name, candidate, reference, pairing, policy)
    indices: Sequence[int] = range(len(pairing.rows))
    if is_head(name):
        paired = enumerate(pairing.rows)
        indices = [at for at, row in paired if row.candidate.head is not None and row.reference.head is not None]
    if behind is not None and bool(behind.any()) and len(indices):
        indices = [index for index in indices if not behind[index]]
        if not indices:
            return CheckpointComparison(name, "not comparable", "every row stands behind a near-tie of a router")
    rows = tuple(pairing.rows[index] for index in indices)
    places = {
        CANDIDATE: [row.candidate for row in rows],
        REFERENCE: [row.reference for row in rows],
    }
    traces = {CANDIDATE: candidate, REFERENCE: reference}
    sides = {side: gather(trace, name, places[side]) for side, trace in traces.items()}
    wrong = {}
    if name.endswith(SLOTS):
        wrong = {side: _wrong_slots(one, rows) for side, one in sides.items() if one is not None}
    return replace(
        _compare_gathered(name, sides, rows, traces, places, policy, indices, alike),
        wrong_slots={side: keys for side, keys in wrong.items() if keys},
    )


def _compare_gathered(
    name: str,
    sides: Mapping[str, Gathered | None],
    rows: Sequence[PairedRow],
    traces: Mapping[str, Recorded],
    places: Mapping[str, Sequence[Place]],
    policy: TensorPolicy,
    indices: Sequence[int],
    alike: Alike | None,
) -> CheckpointComparison:
    """The paired rows of one checkpoint: values if both sides have them, else digests."""
    estimated = None in sides.values()
    if estimated:
        digests = {side: _gather_digest(trace, name, places[side]) for side, trace in traces.items()}
        lacking = [side for side in traces if sides[side] is None and digests[side] is None]
        if lacking or not rows:
            return CheckpointComparison(name, "not observable", _why_not(name, lacking, traces, bool(rows)))
        mixed = [side for side in traces if digests[side] is None]
        if mixed:
            raise ValueError(f"the {mixed[0]} has values and no digest, the other side has a digest and no values")
        sides = digests
    left, right = sides[CANDIDATE], sides[REFERENCE]
    assert left is not None and right is not None
    both = sorted(set(left.rows) & set(right.rows))
    if not both:
        raise ValueError("the two sides recorded different rows of it")
    asked = {side: len(rows) if not estimated else _digests_asked(traces[side], places[side]) for side in traces}
    missing = {side: max(0, asked[side] - len(has.rows)) for side, has in ((CANDIDATE, left), (REFERENCE, right))}
    a, b, note = reconcile(_at(left, both), _at(right, both))
    chosen = [rows[index] for index in both]
    compared = _judge(name, a, b, chosen, policy, estimated)
    if alike is not None and not estimated:
        at = [indices[index] for index in both]
        alike.note(name, at, a, b)
        if policy.name == "derived" and compared.verdict in ("within", "beyond"):
            compared = _judge_alike(compared, alike, at, chosen, a, b)
    return replace(compared, note=note, rows_missing={side: count for side, count in missing.items() if count})


def _judge_alike(
    compared: CheckpointComparison,
    alike: Alike,
    indices: Sequence[int],
    rows: Sequence[PairedRow],
    a: torch.Tensor,
    b: torch.Tensor,
) -> CheckpointComparison:
    """Rows with equal inputs are judged by the operator's own roundings."""
    found = alike.judge(compared.name, indices, rows, a, b)
    if found is None:
        return compared
    row = rows[found.index]
    more: Said | str = ""
    if found.rows_total > 1:
        more = said("carried.alike_more", others=found.rows_total - 1, rows=found.rows_alike)
    told = said("carried.alike", place=place(row), value=found.rel_l2, limit=found.limit, more=more)
    if compared.verdict == "beyond" and compared.said is not None:
        told = said("list.semicolon", parts=[told, compared.said])
    return replace(compared, verdict="beyond", why=text_of(told), said=told, worst=row, alike_row=row.key)


def place(row: PairedRow) -> Said:
    """``r2 position 9``; of rows that are not named ``step 0 row 9``."""
    if not row.phase:
        return said("carried.step_row", step=row.key.request, row=row.key.position)
    return said("place.row", request=row.key.request, position=row.key.position)


def _at(side: Gathered, rows: list[int]) -> torch.Tensor:
    if len(rows) == len(side.rows):
        return side.tensor
    place = {row: index for index, row in enumerate(side.rows)}
    return side.tensor[[place[row] for row in rows]]


def _gather_digest(trace: Recorded, name: str, places: Sequence[Place]) -> Gathered | None:
    if trace.structure is None:
        return None
    return gather(trace, name, places, lambda step: joined_digest(trace, step, name), digests=True)


def _digests_asked(trace: Recorded, places: Sequence[Place]) -> int:
    """How many of the places should have a digest: a lean recording chooses some."""
    chosen = {entry.step: entry.digested for entry in real_steps(trace)}
    return sum(kept is None or place.index in kept for place in places for kept in (chosen[place.step],))


def _why_not(name: str, lacking: list[str], traces: Mapping[str, Recorded], any_rows: bool) -> str:
    if not any_rows:
        return "no row is on both sides"
    words = []
    for side in lacking:
        trace = traces[side]
        reasons = [entry.failures[name] for entry in real_steps(trace) if name in entry.failures]
        words.append(f"not recorded by the {side}" + (f" ({reasons[0]})" if reasons else ""))
    return "; ".join(words)


def _wrong_slots(side: Gathered, rows: Sequence[PairedRow]) -> tuple[RowKey, ...]:
    """Rows whose canonical slot, the position that the block table gives it, is not their own position."""
    keys = [rows[index].key for index in side.rows]
    return tuple(key for key, slot in zip(keys, side.tensor.reshape(-1).tolist(), strict=True) if slot != key.position)


def _judge(
    name: str, a: torch.Tensor, b: torch.Tensor, rows: Sequence[PairedRow], policy: TensorPolicy, estimated: bool
) -> CheckpointComparison:
    phases: dict[str, Metrics] = {}
    spread: Spread | None = None
    if estimated:
        policy = policy.without_floor()  # floors are of values: eight projections add noise of their own
        metrics = estimate(a, b)
        if policy.name == "seed":
            lacking = "the seeds' thresholds need values, and only digests were recorded"
            return CheckpointComparison(
                name, "not observable", lacking, metrics=metrics, rows=len(rows), estimated=True
            )
    elif same_bits(a, b):
        metrics = identical(a)
    else:
        metrics, phases, spread = _measure(a, b, rows)

    def judge(found: Metrics, count: int) -> tuple[Judged, Said]:
        token = found.worst_token
        return policy.judge(name, found, count, None if token is None or found.equal else place(rows[token.index]))

    verdict, why = judge(metrics, len(rows))
    if verdict != "beyond" and policy.name == "derived":
        for phase, part in phases.items():
            count = sum(row.phase == phase for row in rows)
            judged, reason = judge(part, count)
            if judged == "beyond":
                verdict, why = judged, said("carried.in_phase", phase=phase, why=reason)
                break
    if estimated:
        why = said("carried.estimated", why=why)
    nonfinite = None
    if metrics.nonfinite and verdict != "beyond":
        nonfinite = rows[_first_nonfinite(a)].key
        why = said("carried.nonfinite", why=why, count=metrics.nonfinite)
    worst = metrics.rows[0] if metrics.rows else metrics.worst_token.index if metrics.worst_token else None
    return CheckpointComparison(
        name,
        verdict,
        text_of(why),
        metrics=metrics,
        phases=phases,
        rows=len(rows),
        worst=None if worst is None or metrics.equal else rows[worst],
        estimated=estimated,
        seed=policy.seed_passes(metrics),
        nonfinite_row=nonfinite,
        said=why if verdict == "beyond" else None,
        spread=spread,
        shape=() if estimated else tuple(a.shape),
        dtypes={} if estimated else {CANDIDATE: _dtype(a), REFERENCE: _dtype(b)},
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_nonfinite(tensor: torch.Tensor) -> int:
    """The first row ``[N, …]`` with an element that is not finite; there is one."""
    return int((~torch.isfinite(tensor)).reshape(tensor.shape[0], -1).any(1).float().argmax())


def _measure(
    a: torch.Tensor, b: torch.Tensor, rows: Sequence[PairedRow]
) -> tuple[Metrics, dict[str, Metrics], Spread | None]:
    """Over all rows and over those of each phase, and how it is spread."""
    places: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row.phase, []).append(index)
    if len(places) == 1:
        block = measure_block(a, b)
        whole = join([block])
        return whole, dict.fromkeys(places, whole), spread_of([block], rows)
    blocks = {phase: measure_block(a[indices], b[indices]).at(indices) for phase, indices in places.items()}
    every = list(blocks.values())
    return join(every), {phase: join([block]) for phase, block in blocks.items()}, spread_of(every, rows)


def _compare_by_order(
    name: str, candidate: Recorded, reference: Recorded, pairing: Pairing, policy: TensorPolicy
) -> CheckpointComparison:
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    rows: list[PairedRow] = []
    notes: list[str] = []
    lacking: dict[str, int] = {}
    for left_step, right_step in pairing.steps:
        left, right = candidate.joined(left_step, name), reference.joined(right_step, name)
        if left is None or right is None:
            for side, value in ((CANDIDATE, left), (REFERENCE, right)):
                if value is None:
                    lacking[side] = lacking.get(side, 0) + 1
            continue
        a, b, note = reconcile(left, right)
        if not a.dim():
            a, b = a.reshape(1), b.reshape(1)
        pieces.append((a, b))
        notes += [note] if note else []
        rows += [
            PairedRow(
                RowKey(f"step {left_step}", row, 0), "", Place(left_step, row, None), Place(right_step, row, None)
            )
            for row in range(a.shape[0])
        ]
    if not pieces:
        sides = " and ".join(sorted(lacking)) or "either side"
        return CheckpointComparison(name, "not observable", f"not recorded by the {sides}")
    shapes = {tuple(a.shape[1:]) for a, _ in pieces}
    if len(shapes) > 1:
        raise ValueError(f"its shape changes from step to step: {sorted(shapes)}")
    a, b = (torch.cat(side) for side in zip(*pieces, strict=True))
    compared = _judge(name, a, b, rows, policy, estimated=False)
    return replace(compared, note="; ".join(dict.fromkeys(notes)), rows_missing=lacking)
