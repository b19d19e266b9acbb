"""Which rows of two traces belong together: by (request, position, occurrence), never by batch order.

Dummy steps do not take part. Once a request's token ids part, later rows compute different things on both sides and
are counted, not compared. Directories that do not say which rows they hold (hand-written `.pt` files) are paired by
row order, step by step.

Sets whose rows are routed (expert inputs, keyed by expert and token) will be another kind of key here: what reads the
values (:mod:`align.compare.gather`) sees only places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from align.compare.histories import InputDifference, asked_ids, input_differences, parted_at
from align.compare.rows import CANDIDATE, REFERENCE, PairedRow, Place, Recorded, RowKey, read_rows, real_steps
from align.trace.format import POSITIONS, TOKEN_IDS, StepEntry

__all__ = ["InputDifference", "PairedRow", "Pairing", "Place", "Recorded", "RowKey", "pair_rows"]

ONLY = {CANDIDATE: "only on the candidate", REFERENCE: "only on the reference"}
PARTED = "after the histories part"
_UNCHECKED = {
    TOKEN_IDS: "equal histories are taken from what was asked for",
    POSITIONS: "the positions fed to the engine are not observable",
}


@dataclass(frozen=True)
class Pairing:
    """The paired rows of two traces in one common order: request, position, occurrence.

    Attributes:
        rows: what both sides have.
        unpaired: rows that are not compared, counted by reason.
        parted: request → first position at which the two sides' token ids differ.
        inputs: what the engines should not have been fed; the first few of each request.
        by_order: rows are unknown and paired by their order in each step.
        steps: ``by_order``: pairs of step numbers, candidate's first.
        notes: what could not be checked.
    """

    rows: tuple[PairedRow, ...] = ()
    unpaired: Mapping[str, int] = field(default_factory=dict)
    parted: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[InputDifference, ...] = ()
    by_order: bool = False
    steps: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def pair_rows(candidate: Recorded, reference: Recorded) -> Pairing:
    """Pair the rows of two traces; see the module's text.

    Raises:
        ValueError: a trace cannot be read.
    """
    entries = {CANDIDATE: real_steps(candidate), REFERENCE: real_steps(reference)}
    if any(not entry.rows for side in entries.values() for entry in side):
        return _pair_by_order(entries[CANDIDATE], entries[REFERENCE])
    sides = {CANDIDATE: read_rows(candidate), REFERENCE: read_rows(reference)}
    asked = {CANDIDATE: asked_ids(candidate.manifest), REFERENCE: asked_ids(reference.manifest)}
    parted = parted_at(sides, asked)
    left, right = sides[CANDIDATE], sides[REFERENCE]
    both = left.places.keys() & right.places.keys()
    unpaired = Counter({ONLY[CANDIDATE]: len(left.places) - len(both), ONLY[REFERENCE]: len(right.places) - len(both)})
    order = _request_order(reference.manifest, right.places)
    rows = []
    for key in sorted(both, key=lambda key: (order.get(key.request, len(order)), *key)):
        if key.position >= parted.get(key.request, key.position + 1):
            unpaired[PARTED] += 1
        else:
            rows.append(PairedRow(key, left.phases[key], left.places[key], right.places[key]))
    notes = [
        f"the {side} did not record {name} in every step: {_UNCHECKED[name]}"
        for side, about in sides.items()
        for name in sorted(about.unrecorded)
    ]
    return Pairing(
        rows=tuple(rows),
        unpaired={reason: count for reason, count in unpaired.items() if count},
        parted=parted,
        inputs=input_differences(sides, asked, parted),
        notes=tuple(notes),
    )


def _pair_by_order(candidate: Sequence[StepEntry], reference: Sequence[StepEntry]) -> Pairing:
    steps = tuple((left.step, right.step) for left, right in zip(candidate, reference, strict=False))
    surplus = {ONLY[CANDIDATE]: len(candidate) - len(steps), ONLY[REFERENCE]: len(reference) - len(steps)}
    return Pairing(
        unpaired={f"steps {reason}": count for reason, count in surplus.items() if count},
        by_order=True,
        steps=steps,
        notes=("rows are not named: paired by step and row order; equal inputs are not observable",),
    )


def _request_order(manifest: Mapping[str, Any], places: Mapping[RowKey, Place]) -> dict[str, int]:
    named = [request["name"] for request in manifest.get("requests", ())]
    return {name: index for index, name in enumerate(dict.fromkeys([*named, *(key.request for key in places)]))}
