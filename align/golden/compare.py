"""Both sides of a run against golden, over the rows that all three have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.transformers.tensors import ABSENT
from align.checkpoints.table import parse
from align.compare.gather import Gathered, gather, is_head, reconcile
from align.compare.metrics import join, measure_block
from align.compare.rows import CANDIDATE, REFERENCE, Place, Recorded, RowKey, read_rows
from align.golden.experts import first_apart, used_by
from align.golden.judge import GoldenCheckpoint, GoldenPolicy, judge
from align.trace.format import TOKEN_IDS

Progress = Callable[[int, int, str], None]
GOLDEN = "golden"


@dataclass(frozen=True)
class GoldenComparison:
    """A run against golden.

    Attributes:
        policy: the thresholds that were used.
        checkpoints: layer 0 first, in the table's order.
        rows: that all three have.
        notes: what could not be checked.
    """

    policy: GoldenPolicy
    checkpoints: tuple[GoldenCheckpoint, ...]
    rows: int
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> GoldenCheckpoint | None:
        """The first checkpoint at which a side departs from the truth."""
        return next((one for one in self.checkpoints if one.departs), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "policy": self.policy.to_dict(),
            "first": None if self.first is None else self.first.name,
            "rows": self.rows,
            "checkpoints": [one.to_dict() for one in self.checkpoints],
            "notes": list(self.notes),
        }


def compare_golden(
    candidate: Recorded, reference: Recorded, golden: Recorded, policy: GoldenPolicy, progress: Progress | None = None
) -> GoldenComparison:
    """Compare; what a side did not keep the values of is ``not observable``, and one bad record never stops the rest.

    Raises:
        ValueError: a trace cannot be read at all, or no row is on all three.
    """
    traces = {CANDIDATE: candidate, REFERENCE: reference, GOLDEN: golden}
    structure = reference.structure
    if structure is None:
        raise ValueError("it is not known what the model is made of")
    places, notes = _places(traces)
    names = [str(name) for name in structure.names()]
    found = []
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        try:
            found.append(_one(name, traces, places, policy))
        except Exception as error:  # one bad record never aborts the whole, whatever is wrong with it
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            found.append(GoldenCheckpoint(name, "not observable", reason))
    return GoldenComparison(policy, tuple(found), len(places[GOLDEN]), notes)


def _places(traces: Mapping[str, Recorded]) -> tuple[dict[str, list[Place]], tuple[str, ...]]:
    """By trace, where each row that all three have stands; and what is left out."""
    sides = {who: read_rows(trace) for who, trace in traces.items()}
    truth = sides[GOLDEN]
    found: dict[str, list[Place]] = {who: [] for who in traces}
    other = behind = 0
    apart = first_apart(used_by(traces[CANDIDATE]), used_by(traces[REFERENCE]))
    both = [key for key in sides[REFERENCE].places if key in sides[CANDIDATE].places]
    for key in both:
        own = RowKey(key.request, key.position, 0)  # golden computes everything once
        if own not in truth.places:
            continue
        fed = {sides[who].fed[TOKEN_IDS].get(key) for who in (CANDIDATE, REFERENCE)} - {None}
        if fed - {truth.fed[TOKEN_IDS].get(own)}:
            other += 1
            continue
        if key.position >= apart.get(key.request, key.position + 1):
            behind += 1
            continue
        for who in traces:
            found[who].append(sides[who].places[own if who == GOLDEN else key])
    if not found[GOLDEN]:
        raise ValueError("no row is on the candidate, the reference and golden")
    notes = [f"{other} rows are left out: a side was fed other tokens there than golden"] if other else []
    if behind:
        notes.append(
            f"{behind} rows are left out: they stand at or behind a token for which the sides used different experts "
            "(align run --replay-routing always compares them)"
        )
    return found, tuple(notes)


def _one(
    name: str,
    traces: Mapping[str, Recorded],
    places: Mapping[str, list[Place]],
    policy: GoldenPolicy,
) -> GoldenCheckpoint:
    absent = ABSENT.get(parse(name).kind.name)
    if absent is not None:
        return GoldenCheckpoint(name, "not observable", absent)
    chosen: Sequence[int] = range(len(places[GOLDEN]))
    if is_head(name):
        chosen = [at for at in chosen if all(where[at].head is not None for where in places.values())]
    gathered = {who: gather(trace, name, [places[who][at] for at in chosen]) for who, trace in traces.items()}
    truth = gathered[GOLDEN]
    if truth is None:
        return GoldenCheckpoint(name, "not observable", "golden did not yield it")
    present = {who: one for who, one in gathered.items() if one is not None}
    rows = sorted(set.intersection(*(set(one.rows) for one in present.values())))
    if not rows:
        return GoldenCheckpoint(name, "not observable", "no row of it is on all three")
    values = {who: _at(one, rows) for who, one in present.items()}
    for who in (CANDIDATE, REFERENCE):
        if who in values:
            values[who], values[GOLDEN], _ = reconcile(values[who], values[GOLDEN])
    if len(values) == len(traces):
        return judge(name, values[CANDIDATE], values[REFERENCE], values[GOLDEN], policy)
    alone = {who: join([measure_block(values[who], values[GOLDEN])]) for who in values if who != GOLDEN}
    lacking = " and ".join(f"the {who}'s" for who in (CANDIDATE, REFERENCE) if who not in values)
    return GoldenCheckpoint(
        name,
        "not observable",
        f"{lacking} values were not kept (--capture keeps them)",
        candidate=alone.get(CANDIDATE),
        reference=alone.get(REFERENCE),
        expected=policy.limit(name),
        rows=len(rows),
    )


def _at(side: Gathered, rows: list[int]) -> torch.Tensor:
    if len(rows) == len(side.rows):
        return side.tensor
    place = {row: index for index, row in enumerate(side.rows)}
    return side.tensor[[place[row] for row in rows]]
