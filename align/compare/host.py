"""Host fallback: floats that were computed on the host inside a forward and then moved to the device.

A finding, whatever the numbers say: a simulated device computes as the host does, and on hardware the difference may
be small at each step and add up (seed 003: cos and sin on the CPU cost 2 points of a benchmark). What the numbers say
stands in its evidence. Single elements, and floats that were on the host before the step, are information only. So is
an operator that `torch_npu` says it ran on the host, unless a recorded step used it to make floats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from align.checkpoints.table import kinds, parse
from align.compare.calls import calls_of
from align.compare.checkpoint import CheckpointComparison
from align.compare.rows import Recorded
from align.compare.tensors import TensorComparison
from align.findings import Finding, told
from align.sentences import Said, said, text_of
from align.trace.calls import CallRecords, FloatOperator, HostMove

KIND = "host fallback"
#: Manifest key: what torch_npu said in the side's log, see :mod:`align.run.fallbacks`.
WARNINGS = "fallback_warnings"
_LISTED = 6


def host_fallbacks(
    comparison: TensorComparison, traces: Mapping[str, Recorded]
) -> tuple[list[Finding], list[Finding], list[str]]:
    """``(findings whose numbers are affected, the other findings, information in words)``."""
    records = {side: calls_of(trace) for side, trace in traces.items()}
    moves = {side: _moves(trace) for side, trace in traces.items()}
    affected: list[Finding] = []
    others: list[Finding] = []
    information = [
        f"host fallback is not observable on the {side}: its records of calls are damaged"
        for side, trace in traces.items()
        if records[side] is None and hasattr(trace, "calls")
    ]
    for side, record in records.items():
        for what, why in () if record is None else record.failures:
            information.append(f"the {side}'s calls were not looked at wholly: {what}: {why}")
    for side, trace in traces.items():
        for group in _grouped([one for _, one in moves[side] if _counts(one)]):
            ranks = tuple(sorted({rank for rank, one in moves[side] if one in group}))
            finding = _finding(side, group, ranks, comparison, moves)
            (affected if finding.evidence["affected"] else others).append(finding)
        information += [_told(side, group) for group in _grouped([one for _, one in moves[side] if not _counts(one)])]
        found, notes = _warned(side, trace.manifest.get(WARNINGS) or (), records[side], comparison)
        for finding in found:
            (affected if finding.evidence["affected"] else others).append(finding)
        information += notes
    return affected, others, information


def _moves(trace: Recorded) -> list[tuple[int, HostMove]]:
    """``(rank, move)`` of all ranks; nothing of a trace that holds none, or whose file is damaged."""
    read = getattr(trace, "calls", None)
    found: list[tuple[int, HostMove]] = []
    if read is None:
        return found
    for rank in trace.ranks:
        with suppress(ValueError):  # a damaged file; whatever needs it says so
            found += [(rank, move) for move in read(rank).moves]
    return found


def _counts(move: HostMove) -> bool:
    return move.computed and prod(move.shape) > 1


def checkpoint_of(move: HostMove) -> str | None:
    """The nearest checkpoint: of the tapped call that was running, or else of the first that was given it."""
    return next(iter([*move.inside, *(name for name, _ in move.feeds)]), None)


def _grouped(moves: Sequence[HostMove]) -> list[list[HostMove]]:
    """Moves of one function to one checkpoint are one matter."""
    groups: dict[tuple[str, str | None], list[HostMove]] = defaultdict(list)
    for one in moves:
        place, _, function = (one.moved_at[0] if one.moved_at else one.moved_by).partition(" ")
        groups[f"{place.rpartition(':')[0]} {function}", _kind(checkpoint_of(one))].append(one)
    return list(groups.values())


def _kind(checkpoint: str | None) -> str | None:
    """Of whatever layer: the same call in another layer is the same matter."""
    return None if checkpoint is None else parse(checkpoint).kind.name


def _unique(found: Sequence[Any]) -> list[Any]:
    return [one for index, one in enumerate(found) if one not in found[:index]]


def _names(found: Sequence[str]) -> str:
    shown = _unique(found)
    return ", ".join(shown[:_LISTED]) + (f", … ({len(shown)})" if len(shown) > _LISTED else "")


def _made(group: Sequence[HostMove]) -> list[Said]:
    places = [(one.made_by, one.made_at[0] if one.made_at else said("host.unknown_place")) for one in group]
    return [said("host.made", operator=operator, place=place) for operator, place in _unique(places)[:_LISTED]]


def _moved(group: Sequence[HostMove]) -> str:
    return _names([one.moved_at[0] if one.moved_at else one.moved_by for one in group])


def _finding(
    side: str,
    group: Sequence[HostMove],
    ranks: tuple[int, ...],
    comparison: TensorComparison,
    moves: Mapping[str, Sequence[tuple[int, HostMove]]],
) -> Finding:
    order = [name for one in group if (name := checkpoint_of(one)) is not None]
    checkpoint = min(order, key=lambda name: parse(name).order, default=None)
    feeds = list(dict.fromkeys(argument for one in group for name, argument in one.feeds if name == checkpoint))
    phases = {one.phase for one in group}
    steps = {one.step for one in group}
    other = next((name for name in moves if name != side), None)
    both = other is not None and _kind(checkpoint) in {
        _kind(checkpoint_of(one)) for _, one in moves[other] if _counts(one)
    }
    measured, numbers = _measured(side, other, checkpoint, comparison, both)
    where = (
        said("host.feeds", arguments=feeds, checkpoint=checkpoint) if feeds and checkpoint else _near(group, checkpoint)
    )
    count = sum(one.count for one in group)
    first = group[0]
    return Finding(
        "B",
        "host fallback",
        side=side,
        checkpoint=checkpoint if checkpoint is not None and parse(checkpoint).kind.name in kinds() else None,
        layer=None if checkpoint is None else parse(checkpoint).layer,
        phase=next(iter(phases)) if len(phases) == 1 else None,
        ranks=ranks,
        evidence={
            **measured,
            **_numbered(numbers),
            **told(
                said(
                    "host.moved",
                    made=_made(group),
                    moved=_moved(group),
                    count=count,
                    steps=len(steps),
                    where=where,
                    measured=numbers,
                )
            ),
            "made": list(dict.fromkeys(one.made_by for one in group)),
            "made_at": list(dict.fromkeys(at for one in group for at in one.made_at[:1])),
            "moved_at": list(dict.fromkeys(at for one in group for at in one.moved_at[:1])),
            "stack": list(first.moved_at),
            "shape": list(first.shape),
            "dtype": first.dtype,
            "count": count,
            "steps": len(steps),
            "seen_in": sorted(phases),
            "arguments": feeds,
            "after": first.after,
        },
        next=f"compute it on the device, in the precision of the other side: {_moved(group)}",
    )


def _near(group: Sequence[HostMove], checkpoint: str | None) -> Said:
    if checkpoint is not None:
        return said("host.inside", checkpoint=checkpoint)
    after = group[0].after
    return said("host.before") if after is None else said("host.behind", checkpoint=after)


# ----------------------------------------------------------------------------------------------------------- measured


def _measured(
    side: str, other: str | None, checkpoint: str | None, comparison: TensorComparison, both: bool
) -> tuple[dict[str, Any], Said]:
    """What the numbers say: the operator's own error on both sides, and the sides' difference.

    Returns:
        ``affected``; ``residuals`` by side (roundings of an element's magnitude, and relative L2); ``difference``
        between the sides. And all of it as a sentence.
    """
    found = next((one for one in comparison.checkpoints if one.name == checkpoint), None)
    unknown = {"affected": False, "residuals": {}, "difference": None}
    if found is None:
        return unknown, said("host.not_compared_at_all")
    residuals = {name: _residual(found, name) for name in found.added}
    difference = _difference(found)
    mine = found.added.get(side)
    # What differs beyond rounding on inputs that agree, or adds more than rounding by itself.
    affected = (mine is not None and mine.verdict == "beyond") or (
        found.verdict == "beyond" and found.inputs_state in ("equal", "within")
    )
    about = {"affected": affected, "residuals": residuals, "difference": difference}
    numbers = _numbers(found, side, other)
    if both:
        return about, said("host.both", other=other, numbers=numbers)
    return about, numbers if other is None else said("host.against", other=other, numbers=numbers)


def _numbered(numbers: Said) -> dict[str, Any]:
    return {"said": text_of(numbers), "numbers": numbers}


def _residual(found: CheckpointComparison, side: str) -> dict[str, Any] | None:
    parts = [part.residual for part in found.added[side].parts if part.residual.verdict in ("within", "beyond")]
    if not parts:
        return None
    worst = max(parts, key=lambda one: (one.ratio or 0.0) / (one.allowed or 1.0))
    return {
        "verdict": found.added[side].verdict,
        "ratio": worst.ratio,
        "allowed": worst.allowed,
        "rel_l2": max((one.rel_l2 for one in parts if one.rel_l2 is not None), default=None),
    }


def _difference(found: CheckpointComparison) -> dict[str, Any] | None:
    if not found.compared:
        return None
    metrics = found.metrics
    return {
        "checkpoint": found.name,
        "verdict": found.verdict,
        "inputs": found.inputs_state,
        "rel_l2": 0.0 if metrics is None else metrics.rel_l2,
        "max_abs": 0.0 if metrics is None else metrics.max_abs,
    }


def _numbers(found: CheckpointComparison, side: str, other: str | None) -> Said:
    words = []
    difference = _difference(found)
    if difference is None:
        words.append(said("host.not_compared", name=found.name))
    elif found.verdict == "equal":
        words.append(said("host.equal", name=found.name))
    elif difference["rel_l2"] is None:
        words.append(said("host.same", name=found.name, verdict=found.verdict))
    else:
        words.append(said("host.differs", name=found.name, value=difference["rel_l2"], verdict=found.verdict))
    for name in (side, other):
        residual = _residual(found, name) if name is not None and name in found.added else None
        if residual is not None and residual["rel_l2"] is not None:
            words.append(said("host.own", side=name, value=residual["rel_l2"]))
    return said("list.comma", parts=words)


# -------------------------------------------------------------------------------------------------------- information


def _told(side: str, group: Sequence[HostMove]) -> str:
    first = group[0]
    if first.computed:
        return (
            f"the {side} computes a single float on the host in its forward and moves it to the device: "
            f"{text_of(said('list.comma', parts=_made(group)))}"
        )
    return (
        f"the {side} moves floats to the device in its forward that were on the host before: {first.dtype} "
        f"{list(first.shape)} at {_moved(group)}"
    )


def _warned(
    side: str, warnings: Sequence[Mapping[str, Any]], records: CallRecords | None, comparison: TensorComparison
) -> tuple[list[Finding], list[str]]:
    """Operators that torch_npu ran on the host."""
    used: dict[str, FloatOperator] = {}
    for one in () if records is None else records.operators:
        used.setdefault(one.name, one)
    found, notes = [], []
    for warning in warnings:
        name = str(warning["operator"])
        seen = used.get(name.partition(".")[0])
        if seen is None:
            notes.append(
                f"torch_npu ran {name} on the host of the {side}, outside the recorded steps or for no floats"
                + (f" ({warning['place']})" if warning.get("place") else "")
            )
            continue
        checkpoint = next(iter(seen.inside), None)
        measured, numbers = _measured(side, None, checkpoint, comparison, False)
        place = seen.at[0] if seen.at else str(warning.get("place") or "an unknown place")
        found.append(
            Finding(
                "B",
                "host fallback",
                side=side,
                checkpoint=checkpoint,
                layer=None if checkpoint is None else parse(checkpoint).layer,
                evidence={
                    **measured,
                    **_numbered(numbers),
                    **told(said("host.warned", operator=name, place=place, measured=numbers)),
                    "made": [name],
                    "made_at": [place],
                    "moved_at": [],
                    "stack": list(seen.at),
                    "after": seen.after,
                    "warning": str(warning.get("line", "")),
                },
                next=f"replace {name} by an operator that the device has: {place}",
            )
        )
    return found, notes
