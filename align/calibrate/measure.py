"""Numbers of one pair of recordings that are both right: distances by kind of checkpoint, and operators' own errors.

A comparison judges all rows together and those of each phase, of whatever requests a user gives: noise of a single
row is larger than that of many. So every pair is measured over all rows, each phase, each request, and each phase of
each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from align.checkpoints.table import parse
from align.compare.added import judge_added
from align.compare.gather import Gathered, gather, is_head, reconcile
from align.compare.metrics import Block, Metrics, join, measure_block
from align.compare.pairing import pair_rows
from align.compare.policy import CHANNEL_ROWS, TensorPolicy, layer_of
from align.compare.rows import PairedRow, Recorded
from align.compare.tensors import Progress, ordered_names

#: Of a floor, and :data:`align.compare.floor.METRICS`: an operator's numbers as parts of what they may be.
RESIDUALS = ("element", "token gain", "channel gain", "head gain", "token norm")


@dataclass(frozen=True)
class Sample:
    """One number.

    Attributes:
        kind: of the checkpoint.
        metric: of :data:`align.compare.floor.METRICS` or :data:`RESIDUALS`.
        value: in units of the prediction (a relative L2), or as a part of what is allowed (a residual).
        raw: the relative L2, or the residual as it is.
        where: checkpoint, rows and pair, in words.
    """

    kind: str
    metric: str
    value: float
    raw: float
    where: str


def measure_pair(
    label: str, one: Recorded, other: Recorded, policy: TensorPolicy, progress: Progress | None = None
) -> Iterator[Sample]:
    """Distances of ``one`` from ``other`` at every checkpoint whose values both have; integers are left out.

    Raises:
        ValueError: a trace cannot be read, a record is damaged, or no row is on both. A floor of half of the records
            would say less than it seems to.
    """
    pairing = pair_rows(one, other)
    if pairing.by_order or not pairing.rows:
        raise ValueError(f"{label}: no row is on both")
    names = [name for name in ordered_names(one, other) if not parse(name).kind.integer]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), f"{label}: {name}")
        rows = pairing.rows
        if is_head(name):
            rows = tuple(row for row in rows if row.candidate.head is not None and row.reference.head is not None)
        left = gather(one, name, [row.candidate for row in rows])
        right = gather(other, name, [row.reference for row in rows])
        if left is None or right is None:
            continue
        both = sorted(set(left.rows) & set(right.rows))
        a, b, _ = reconcile(_at(left, both), _at(right, both))
        yield from _samples(name, label, a, b, [rows[index] for index in both], policy)


def _at(side: Gathered, rows: Sequence[int]) -> torch.Tensor:
    place = {row: index for index, row in enumerate(side.rows)}
    return side.tensor[[place[row] for row in rows]]


def _samples(
    name: str, label: str, a: torch.Tensor, b: torch.Tensor, rows: Sequence[PairedRow], policy: TensorPolicy
) -> Iterator[Sample]:
    atoms: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        atoms.setdefault((row.key.request, row.phase), []).append(index)
    blocks = {atom: measure_block(a[places], b[places]).at(places) for atom, places in atoms.items()}
    kind, predicted = parse(name).kind.name, policy.predicted(layer_of(name))
    for what, chosen in _unions(blocks):
        metrics, count = join(chosen), sum(block.shape[0] for block in chosen)
        for metric, raw in _numbers(metrics, count):
            yield Sample(kind, metric, raw / predicted, raw, f"{name}, {what} ({count} rows), {label}")


def _unions(blocks: dict[tuple[str, str], Block]) -> Iterator[tuple[str, list[Block]]]:
    """Which rows together, without saying the same ones twice."""
    requests = list(dict.fromkeys(request for request, _ in blocks))
    phases = list(dict.fromkeys(phase for _, phase in blocks))
    seen: set[frozenset[tuple[str, str]]] = set()
    groups = [("all rows", list(blocks))]
    groups += [(phase, [atom for atom in blocks if atom[1] == phase]) for phase in phases]
    groups += [(request, [atom for atom in blocks if atom[0] == request]) for request in requests]
    groups += [(f"{request} {phase}", [(request, phase)]) for request, phase in blocks]
    for what, atoms in groups:
        if frozenset(atoms) not in seen:
            seen.add(frozenset(atoms))
            yield what, [blocks[atom] for atom in atoms]


def _numbers(metrics: Metrics, rows: int) -> Iterator[tuple[str, float]]:
    assert metrics.rel_l2 is not None
    yield "whole", metrics.rel_l2
    channel = metrics.worst_channel if rows >= CHANNEL_ROWS else None
    for metric, worst in (("token", metrics.worst_token), ("channel", channel), ("head", metrics.worst_head)):
        if worst is not None:
            yield metric, worst.rel_l2


def measure_operators(label: str, trace: Recorded) -> Iterator[Sample]:
    """How near the operators of one recording came to what they may add; nothing where they were not recomputed."""
    for name, added in judge_added(trace).items():
        kind = parse(name).kind.name
        for part in added.parts:
            found = part.residual
            if found.verdict == "not observable":
                continue
            where = f"{name}, {part.phase} on rank {part.rank}, {label}"
            if found.allowed:
                yield Sample(kind, "element", found.ratio / found.allowed, found.ratio, where)
            worst = (found.gain_token, found.gain_channel, found.gain_head, found.norm_token)
            for metric, one in zip(RESIDUALS[1:], worst, strict=True):
                if one is not None and one.allowed:
                    yield Sample(kind, metric, abs(one.value) / one.allowed, abs(one.value), where)
