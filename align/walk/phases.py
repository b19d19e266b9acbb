"""When a checkpoint begins to be wrong: in the prefill, in the first decode step of a request, or later.

From the same traces, without another run (seed 000 §3.1: prefill alone, then decode step 1 against step N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from align.checkpoints.table import EXPERT_SUM, parse
from align.compare.checkpoint import compare_checkpoint
from align.compare.collective import OPERATOR, judge_step
from align.compare.expert_sum import worst_of_step
from align.compare.pairing import PairedRow, Pairing
from align.compare.residual import ResidualPolicy, judge, largest_of
from align.compare.rows import Recorded, ranks_of
from align.compare.tensors import TensorComparison
from align.findings import Finding
from align.trace.format import TOKEN_RESIDUAL, WORST_RESIDUAL, StepEntry

Stage = Literal["prefill", "decode 1", "decode N"]
State = Literal["equal", "within", "beyond", "not observable"]
STAGES: tuple[Stage, ...] = ("prefill", "decode 1", "decode N")
_SEVERITY: dict[str, int] = {"not observable": 0, "equal": 1, "within": 2, "beyond": 3}


@dataclass(frozen=True)
class Phases:
    """One checkpoint by stage.

    Attributes:
        states: by stage: the worst of what the sides differ by and of what the accused operator added.
        onset: the first stage that is beyond; ``None`` if none is.
    """

    states: Mapping[Stage, State]

    @property
    def onset(self) -> Stage | None:
        return next((stage for stage in STAGES if self.states.get(stage) == "beyond"), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "onset": self.onset}


def phases_of(name: str, side: str | None, sides: Mapping[str, Recorded], comparison: TensorComparison) -> Phases:
    """When ``name`` is wrong.

    Args:
        side: the accused, whose operator's own error counts too; ``None``: it is not known which.
        sides: the traces that were compared, by role.

    Raises:
        ValueError: a trace cannot be read at all.
    """
    lengths = _prompt_lengths(sides["reference"])
    found: dict[Stage, list[State]] = {stage: [] for stage in STAGES}
    rows: dict[Stage, list[PairedRow]] = {stage: [] for stage in STAGES}
    for row in comparison.pairing.rows:
        rows[_stage_of(row.key.request, row.key.position, lengths)].append(row)
    for stage, chosen in rows.items():
        if chosen:
            part = replace(comparison.pairing, rows=tuple(chosen))
            found[stage].append(_compared(name, sides, part, comparison))
    whole = comparison.get(name)
    if whole is not None and whole.alike_row is not None:  # equal inputs, another result
        found[_stage_of(whole.alike_row.request, whole.alike_row.position, lengths)].append("beyond")
    if side is not None:
        for stage, state in _added(name, sides[side], lengths).items():
            found[stage].append(state)
    worst: dict[Stage, State] = {
        stage: max(states, key=_SEVERITY.__getitem__) for stage, states in found.items() if states
    }
    return Phases(worst)


def _compared(name: str, sides: Mapping[str, Recorded], part: Pairing, comparison: TensorComparison) -> State:
    """How a part of the rows compares; ranks whose copies differ make no tensor that could be compared."""
    try:
        compared = compare_checkpoint(name, sides["candidate"], sides["reference"], part, comparison.policy)
    except ValueError:  # the comparison of the whole has said what
        return "not observable"
    return compared.verdict if compared.verdict != "not comparable" else "not observable"


def with_stages(finding: Finding, trace: Recorded) -> Finding:
    """A finding of the ledger with the stages of the positions whose attention it harmed."""
    lengths = _prompt_lengths(trace)
    harmed = finding.evidence["harmed"].items()
    stages = {_stage_of(request, reach["position"], lengths) for request, reach in harmed}
    states: dict[Stage, State] = {stage: "beyond" for stage in STAGES if stage in stages}
    return replace(finding, evidence={**finding.evidence, "phases": Phases(states).to_dict()})


def _stage_of(request: str, position: int, lengths: Mapping[str, int]) -> Stage:
    length = lengths.get(request)
    if length is None or position < length:
        return "prefill"
    return "decode 1" if position == length else "decode N"


def _prompt_lengths(trace: Recorded) -> dict[str, int]:
    return {one["name"]: int(one["prompt_len"]) for one in trace.manifest.get("requests", ())}


def _added(name: str, trace: Recorded, lengths: Mapping[str, int]) -> dict[Stage, State]:
    """The operator's own error by stage; a step belongs to the earliest stage of its rows."""
    structure = trace.structure
    if structure is None:
        return {}
    steps: dict[tuple[Stage, int], list[StepEntry]] = {}
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            if not entry.dummy:
                steps.setdefault((_stage_of_step(entry, lengths), rank), []).append(entry)
    found: dict[Stage, State] = {}
    operator, policy = structure.operator(parse(name).kind), ResidualPolicy.for_dtype(trace.dtype)
    for (stage, rank), entries in steps.items():
        if operator in (OPERATOR, EXPERT_SUM) and rank == ranks_of(trace, entries[0].step)[0]:
            judged = judge_step if operator == OPERATOR else worst_of_step
            for entry in entries:
                reduced = judged(trace, parse(name), entry, structure, policy)
                if reduced is not None:
                    found[stage] = max((found.get(stage, "not observable"), reduced.verdict), key=_SEVERITY.__getitem__)
        tokens, largest = _sums(trace, rank, entries, name)
        if not largest:
            continue
        # A lean recording has the largest error of each step alone.
        whole = torch.cat(tokens) if tokens else None
        count = sum(span.count for entry in entries for span in entry.rows) if whole is None else len(whole)
        verdict = judge(
            name, operator, policy, tokens=whole, largest=largest_of(largest), channels=None, channel_rows=count
        ).verdict
        found[stage] = max((found.get(stage, "not observable"), verdict), key=_SEVERITY.__getitem__)
    return found


def _stage_of_step(entry: StepEntry, lengths: Mapping[str, int]) -> Stage:
    stages = {_stage_of(span.request, span.start + span.count - 1, lengths) for span in entry.rows}
    return next(stage for stage in STAGES if stage in stages)


def _sums(
    trace: Recorded, rank: int, entries: Iterable[StepEntry], name: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``NAME#res_tok`` ``[R, 3]`` and ``NAME#res_max`` ``[4]`` of each step that can be read and has both."""
    tokens, largest = [], []
    for entry in entries:
        try:
            sums = trace.tensor(rank, entry.step, name + TOKEN_RESIDUAL)
            worst = trace.tensor(rank, entry.step, name + WORST_RESIDUAL)
        except ValueError:  # the comparison has said so
            continue
        if worst is None or (sums is None and entry.digested is None):
            continue
        largest.append(worst)
        if sums is not None:
            tokens.append(sums)
    return tokens, largest
