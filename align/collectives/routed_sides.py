"""Routed experts as each side recorded them, for the hypotheses of :mod:`align.collectives.routed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from align.checkpoints.table import Name, Structure, kinds
from align.collectives.hypotheses import MISSING, WEIGHTED, Tried, first_fit
from align.collectives.routed import Routed, is_right, needs, routed_tried
from align.compare.rows import Recorded, ranks_of, real_steps
from align.errors import UserError
from align.oracle.weights import CheckpointWeights
from align.sentences import said
from align.trace.format import StepEntry

Tensor = torch.Tensor
_Held = tuple[tuple[int, ...], Routed]

SUMMED = "moe.routed"
_INPUTS = ("mlp_norm", "moe.topk_ids", "moe.topk_weights")
#: Wrong steps of a phase that are explained.
_STEPS = 2
#: Multiplications that one step may take: the rows are as many as fit.
_WORK = 4e11


class _Found(NamedTuple):
    """Rows of ranks: what was tried on them if they are wrong, and if right, whether they need what the rank made."""

    ranks: tuple[int, ...]
    tried: tuple[Tried, ...]
    needs_own: bool


def world_of(trace: Recorded) -> int:
    """Ranks of a side."""
    layout = trace.manifest.get("layout") or {}
    return int(layout.get("tp", 1)) * int(layout.get("dp", 1))


def wrong_side(
    name: Name, traces: Mapping[str, Recorded]
) -> tuple[str, tuple[int, ...], list[tuple[Tried, ...]]] | None:
    """The first side on several ranks whose experts do not give what was chosen: side, ranks, what was tried.

    The ranks are those whose rows are wrong: if they are some of all, what is theirs is at fault and not the experts.
    ``None`` if no such side is wrong by its own records.

    Raises:
        ValueError: a record is damaged, or a weight cannot be read.
    """
    for side, trace in traces.items():
        if trace.structure is None or world_of(trace) == 1:
            continue
        path = Path(str((trace.manifest.get("model_info") or {}).get("path", "")))
        try:
            weights = CheckpointWeights(path, trace.structure, getattr(torch, trace.dtype))
        except UserError as error:
            raise ValueError(f"the checkpoint's files are not there: {error}") from error
        with closing(weights):
            found = list(_tried(name, trace, trace.structure, weights))
        wrong = {rank for one in found if one.tried for rank in one.ranks}
        if wrong:
            return side, tuple(sorted(wrong)), _alone(found)
    return None


def _alone(found: list[_Found]) -> list[tuple[Tried, ...]]:
    """What was tried on the wrong ones, as a missing reduce if nothing that others made came back to any rank.

    A part that is left out everywhere looks the same on the ranks that did not make it. It is told apart by the rows of
    the rank that made it: they have it where a reduce is missing. Where no such row needs any part that others lack,
    nothing shows this, and it stays a part that is left out.
    """
    lacks: list[bool] = []
    lost: set[int] = set()
    shown = {one.ranks[0] for one in found if not one.tried and one.needs_own}
    for ranks, tried, _ in found:
        for part in tried:
            if part.state != "fits" or part.name != WEIGHTED:
                continue
            gone = set(part.numbers.get("left_out", ()))
            there = {int(rank) for rank in part.numbers["factors"]}
            if len(ranks) == 1:
                shown |= set(ranks) & there - gone
            if gone:
                lost |= gone
                lacks.append(len(ranks) == 1 and gone == there - set(ranks))
    if not (lost and all(lacks)):
        return [one.tried for one in found if one.tried]
    told = _own_alone if lost & shown else _unshown
    return [
        tuple(told(one, ranks) if one.numbers.get("left_out") else one for one in tried)
        for ranks, tried, _ in found
        if tried
    ]


def _own_alone(one: Tried, ranks: tuple[int, ...]) -> Tried:
    """A part that is left out, told as what the rows of one rank have of others: nothing."""
    what = said("routed.own_alone", ranks=list(ranks), factors=one.what["factors"], residual=one.residual)
    return replace(one, name=MISSING, ranks=ranks, what=what)


def _unshown(one: Tried, ranks: tuple[int, ...]) -> Tried:
    """A part that is left out, of which no row shows whether it is so everywhere."""
    doubt = said("routed.unshown", missing=one.numbers["left_out"])
    return replace(one, what=said("list.semicolon", parts=[one.what, doubt]))


def _tried(name: Name, trace: Recorded, structure: Structure, weights: CheckpointWeights) -> Iterator[_Found]:
    entries = real_steps(trace)
    room = dict.fromkeys((entry.phase for entry in entries), _STEPS)
    for entry in entries:
        if not room[entry.phase]:
            continue
        found = list(_of_step(sent_of(name, trace, entry, structure, weights)))
        if not any(first_fit(one.tried) is not None for one in found):  # what ranks exchange with each other
            whole = list(_of_step(routed_of(name, trace, entry, structure, weights)))
            found = whole if any(one.tried for one in whole) else found
        room[entry.phase] -= any(one.tried for one in found)
        yield from found


def _of_step(held: Iterator[_Held]) -> Iterator[_Found]:
    for ranks, given in held:
        right = is_right(given)
        own = right and len(ranks) == 1 and needs(given, ranks[0])
        yield _Found(ranks, () if right else routed_tried(given), own)


def sent_of(
    name: Name, trace: Recorded, entry: StepEntry, structure: Structure, weights: CheckpointWeights
) -> Iterator[_Held]:
    """As :func:`routed_of`, of the rows that each rank sent to the experts, where the ranks of a group divide them."""
    for rank in ranks_of(trace, entry.step):
        mine = {one.step: one for one in trace.steps(rank)}.get(entry.step)
        part = None if mine is None else mine.part(_INPUTS[1])
        if part is None:
            yield from routed_of(name, trace, entry, structure, weights)
            return
        if part[1]:
            rows = slice(part[0], part[0] + part[1])
            yield from routed_of(name, trace, entry, structure, weights, (rank,), rows)


def routed_of(
    name: Name,
    trace: Recorded,
    entry: StepEntry,
    structure: Structure,
    weights: CheckpointWeights,
    group: tuple[int, ...] = (),
    which: slice = slice(None),
) -> Iterator[_Held]:
    """``(ranks, what they hold)`` of one step; ranks that each hold the whole are looked at one by one.

    Args:
        group: these ranks instead of all that took part.
        which: rows of the step.
    """
    group = group or ranks_of(trace, entry.step)
    inputs = [trace.joined(entry.step, kinds()[one].at(name.layer)) for one in _INPUTS]
    if any(one is None for one in inputs):
        return
    x, ids, shares = (one[which] for one in inputs if one is not None)
    held: list[tuple[tuple[int, ...], Tensor | None]]
    if entry.whole(SUMMED) or structure.tp == 1:
        held = [((rank,), trace.tensor(rank, entry.step, str(name))) for rank in group]
    else:
        held = [(group, trace.joined(entry.step, str(name)))]
    work = structure.experts * structure.hidden * structure.intermediate * 3
    rows = max(8, min(len(x), int(_WORK / max(1, work))))

    def expert(number: int) -> tuple[Tensor, Tensor, Tensor]:
        names = [weights.of_experts(part, name.layer, number) for part in ("gate", "up", "down")]
        gate, up, down = (weights.read(one) for one in names if one is not None)
        return gate.float(), up.float(), down.float()

    shared = structure.ep if structure.ep > 1 else structure.expert_tp
    for ranks, result in held:
        if result is not None:
            yield (
                ranks,
                Routed(
                    x[:rows],
                    ids[:rows],
                    shares[:rows],
                    result[which][:rows],
                    structure.experts,
                    shared,
                    structure.ep == 1,
                    expert,
                ),
            )
