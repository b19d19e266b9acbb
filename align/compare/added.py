"""The error that each operator of one side added, judged from the residuals in its trace.

Every rank and phase is judged by itself: a fault of one rank, or of the decode kernel alone, is not averaged away.
What tensor parallelism sums up over the ranks is judged from the values, see :mod:`align.compare.collective`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

import torch

from align.checkpoints.table import Structure, parse
from align.compare.collective import judge_reduces
from align.compare.expert_sum import judge_expert_sums
from align.compare.lean import worst_sums
from align.compare.residual import ResidualPolicy, ResidualVerdict, judge, largest_of, shown_by
from align.compare.rows import Recorded, keys_of
from align.trace.format import CHANNEL_RESIDUAL, TOKEN_RESIDUAL, WORST_RESIDUAL, StepEntry, checkpoint_of


@dataclass(frozen=True)
class AddedPart:
    """One phase on one rank."""

    phase: str
    rank: int
    residual: ResidualVerdict


@dataclass(frozen=True)
class Added:
    """What the operator of one checkpoint added, on one side.

    Attributes:
        name: the checkpoint.
        verdict: ``beyond`` if a part is, else ``within`` if one was recomputed, else ``not observable``.
        why: of the verdict; empty for ``within``.
        parts: in order of ranks, prefill first.
    """

    name: str
    verdict: Literal["within", "beyond", "not observable"]
    why: str
    parts: tuple[AddedPart, ...] = ()

    @property
    def beyond(self) -> tuple[AddedPart, ...]:
        """The parts that are."""
        return tuple(part for part in self.parts if part.residual.verdict == "beyond")

    @property
    def worst(self) -> AddedPart | None:
        """The first part that gave the verdict."""
        return next((part for part in self.parts if part.residual.verdict == self.verdict), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


_HEAD = "logits"
_PHASES = ("prefill", "mixed", "decode")


def judge_added(trace: Recorded, policy: ResidualPolicy | None = None) -> dict[str, Added]:
    """Judge every residual and every reduce of a trace, by checkpoint; empty if it has none.

    Records that cannot be read become ``not observable`` with the reason.
    """
    structure = trace.structure
    if structure is None:
        return {}
    policy = policy or ResidualPolicy.for_dtype(trace.dtype)
    parts: dict[str, list[AddedPart]] = defaultdict(list)
    for rank in trace.ranks:
        entries = [entry for entry in trace.steps(rank) if not entry.dummy]
        for phase in sorted({entry.phase for entry in entries}, key=_phase_order):
            chosen = [entry for entry in entries if entry.phase == phase]
            for name, residual in _judge_phase(trace, rank, phase, chosen, structure, policy).items():
                parts[name].append(AddedPart(phase, rank, residual))
    for name, judged in (judge_reduces(trace, structure, policy) | judge_expert_sums(trace, structure, policy)).items():
        parts[name] += [AddedPart(phase, rank, residual) for phase, rank, residual in judged]
    return {name: _sum_up(name, tuple(found)) for name, found in parts.items()}


def _phase_order(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def _sum_up(name: str, parts: tuple[AddedPart, ...]) -> Added:
    for verdict in ("beyond", "within"):
        found = [part for part in parts if part.residual.verdict == verdict]
        if found:
            return Added(name, verdict, found[0].residual.why, parts)
    return Added(name, "not observable", parts[0].residual.why, parts)


def _judge_phase(
    trace: Recorded,
    rank: int,
    phase: str,
    entries: list[StepEntry],
    structure: Structure,
    policy: ResidualPolicy,
) -> dict[str, ResidualVerdict]:
    tokens: dict[str, list[torch.Tensor]] = defaultdict(list)
    largest: dict[str, list[torch.Tensor]] = defaultdict(list)
    names: dict[str, list[tuple[str, int]]] = defaultdict(list)
    maxima_rows: dict[str, list[list[tuple[str, int]]]] = defaultdict(list)
    broken: dict[str, str] = {}
    for entry in entries:
        rows = _row_names(entry)
        for key in keys_of(trace, rank, entry.step):
            if not key.endswith(WORST_RESIDUAL):
                continue
            name = checkpoint_of(key)
            try:
                sums = trace.tensor(rank, entry.step, name + TOKEN_RESIDUAL)
                worst = trace.tensor(rank, entry.step, key)
            except ValueError as error:
                broken[name] = str(error)
                continue
            if worst is None or (sums is None and entry.digested is None):
                continue
            largest[name].append(worst)
            maxima_rows[name].append(rows["all"])
            if sums is None:  # a lean recording has the worst rows of the phase
                continue
            tokens[name].append(sums)
            named = rows["head"] if name == _HEAD or len(sums) != len(rows["sampled"]) else rows["sampled"]
            names[name] += named if len(named) == len(sums) else [("", -1)] * len(sums)
    try:
        channels: Mapping[str, torch.Tensor] = trace.accumulated(rank, "residual", phase)
    except ValueError:
        channels = {}  # the rows are judged all the same
    found = {
        name: ResidualVerdict(name, structure.operator(parse(name).kind), "not observable", why)
        for name, why in broken.items()
    }
    for name in largest:
        if name in broken:
            continue
        lean = worst_sums(channels, name, structure, entries) if not tokens[name] else None
        if lean is not None:
            names[name] = lean[1]
        whole = torch.cat(tokens[name]) if tokens[name] else None
        known = all(position >= 0 for _, position in names[name])
        shown = shown_by(largest[name])
        row = int(largest[name][shown][1])
        all_rows = maxima_rows[name][shown]
        found[name] = judge(
            name,
            structure.operator(parse(name).kind),
            policy,
            tokens=whole,
            largest=largest_of(largest[name]),
            channels=channels.get(name + CHANNEL_RESIDUAL),
            channel_rows=0 if whole is None else len(whole),
            row_names=names[name] if known else (),
            largest_name=all_rows[row] if 0 <= row < len(all_rows) else None,
            worst=None if lean is None else lean[0],
            step_maxima=[
                (inf if one[3] > 0 else float(one[0]), named[int(one[1])])
                for one, named in zip(largest[name], maxima_rows[name], strict=True)
                if 0 <= int(one[1]) < len(named)
            ],
        )
    return found


def _row_names(entry: StepEntry) -> dict[str, list[tuple[str, int]]]:
    """``all`` rows of a step, the ``sampled`` ones (all if it does not say), and those that reach the ``head``."""
    rows = [(span.request, position) for span in entry.rows for position in range(span.start, span.start + span.count)]
    sampled = [rows[index] for index in entry.sampled] if entry.sampled else rows
    return {"all": rows, "sampled": sampled, "head": list(entry.logits_rows)}
