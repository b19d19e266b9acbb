"""Whether a layer of experts gives the sum of what its ranks computed, on one side, under tensor parallelism.

Each rank holds its summand of the routed experts' result, or after an exchange of tokens all of it; its summand of the
shared experts; and the whole gate of these. What every rank holds of ``moe.out`` must be the sum of all of that: an
engine may add shared to routed before the reduce or behind it. Each addition rounds, and so do the gate's sigmoid and
its product, of a magnitude that is ``sum |part|``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from align.checkpoints.table import EXPERT_SUM, Name, Structure
from align.compare.collective import Sum, judge_sum, worse
from align.compare.residual import ResidualPolicy, ResidualVerdict
from align.compare.rows import Recorded, ranks_of, real_steps
from align.trace.format import StepEntry

Tensor = torch.Tensor
_Judged = tuple[str, int, ResidualVerdict]


@dataclass(frozen=True)
class ExpertParts:
    """What the ranks of one group computed of a layer of experts, float32 ``[rows, hidden]``.

    Attributes:
        routed: by rank: its summand, or the whole if ``whole``.
        shared: by rank: its summand of the shared experts behind their gate; empty for a model without.
        gated: whether these have a gate.
    """

    routed: Mapping[int, Tensor]
    shared: Mapping[int, Tensor]
    whole: bool
    gated: bool

    @property
    def routed_sum(self) -> Tensor:
        first = next(iter(self.routed.values()))
        return first if self.whole else torch.stack(list(self.routed.values())).sum(0)

    @property
    def shared_sum(self) -> Tensor | None:
        return torch.stack(list(self.shared.values())).sum(0) if self.shared else None

    def own(self, rank: int) -> Tensor:
        """What a rank alone has of both."""
        return self.routed[rank] + self.shared[rank] if self.shared else self.routed[rank]

    @property
    def expected(self) -> Sum:
        """The sum with the roundings that are possible."""
        total, ranks = self.routed_sum, len(self.routed)
        size = total.abs() if self.whole else torch.stack(list(self.routed.values())).abs().sum(0)
        reduces = 0.0 if self.whole and not self.shared else ranks - 1.0
        if not self.shared:
            return Sum(total, size, reduces)
        shared = self.shared_sum
        assert shared is not None
        size = size + torch.stack(list(self.shared.values())).abs().sum(0)
        return Sum(total + shared, size, reduces + (3 if self.gated else 1))


def expert_parts(trace: Recorded, name: Name, entry: StepEntry) -> ExpertParts | str:
    """What the ranks recorded of one step, or why that is not known.

    Args:
        name: a ``moe.out``.

    Raises:
        ValueError: a record is damaged.
    """
    structure = trace.structure
    assert structure is not None
    group = ranks_of(trace, entry.step)
    if len(group) != structure.tp:
        return f"{len(group)} of {structure.tp} ranks are in the trace"
    found: dict[str, dict[int, Tensor]] = {}
    for source in structure.inputs(name):
        kind = source.kind.name
        values = {rank: trace.tensor(rank, entry.step, str(source)) for rank in group}
        lacking = [str(rank) for rank, value in values.items() if value is None]
        if lacking:
            return f"the values of {source} were not recorded on rank {', '.join(lacking)}"
        found[kind] = {rank: value.float() for rank, value in values.items() if value is not None}
    if len({value.shape[0] for values in found.values() for value in values.values()}) > 1:
        return f"step {entry.step}: the ranks' parts of {name} have different numbers of rows"
    shared, gates = found.get("moe.shared", {}), found.get("moe.shared_gate", {})
    behind = {rank: value * gates[rank].sigmoid() if gates else value for rank, value in shared.items()}
    return ExpertParts(found["moe.routed"], behind, entry.whole("moe.routed"), bool(gates))


def judge_expert_sums(trace: Recorded, structure: Structure, policy: ResidualPolicy) -> dict[str, list[_Judged]]:
    """``(phase, rank, verdict)`` of every layer of experts, by checkpoint; empty without tensor parallelism."""
    entries = real_steps(trace)
    found: dict[str, list[_Judged]] = {}
    for name in structure.names():
        if structure.operator(name.kind) != EXPERT_SUM:
            continue
        judged: list[_Judged] = []
        for phase in dict.fromkeys(entry.phase for entry in entries):
            judged += _phase(trace, name, [entry for entry in entries if entry.phase == phase], policy)
        found[str(name)] = judged
    return found


def _phase(trace: Recorded, name: Name, entries: list[StepEntry], policy: ResidualPolicy) -> list[_Judged]:
    worst: dict[int, ResidualVerdict] = {}
    why = ""
    for entry in entries:
        try:
            judged = judge_expert_step(trace, name, entry, policy)
        except ValueError as error:
            why = str(error)
            continue
        if isinstance(judged, str):
            why = judged
            continue
        for rank, verdict in judged.items():
            worst[rank] = worse(worst[rank], verdict) if rank in worst else verdict
    ranks = sorted({rank for entry in entries for rank in ranks_of(trace, entry.step)})
    unseen = ResidualVerdict(str(name), EXPERT_SUM, "not observable", why)
    return [(entries[0].phase, rank, worst.get(rank) or unseen) for rank in ranks]


def judge_expert_step(
    trace: Recorded, name: Name, entry: StepEntry, policy: ResidualPolicy
) -> dict[int, ResidualVerdict] | str:
    """What each rank holds of one step, or why that is not known.

    Raises:
        ValueError: a record is damaged.
    """
    parts = expert_parts(trace, name, entry)
    if isinstance(parts, str):
        return parts
    values = {rank: trace.tensor(rank, entry.step, str(name)) for rank in parts.routed}
    held = {rank: value for rank, value in values.items() if value is not None}
    if not held:
        return f"the values of {name} were not recorded"
    expected = parts.expected
    if any(value.shape != expected.total.shape for value in held.values()):
        return f"step {entry.step}: {name} has another shape than its parts"
    return judge_sum(str(name), EXPERT_SUM, entry, expected, held, policy)


def worst_of_step(
    trace: Recorded, name: Name, entry: StepEntry, structure: Structure, policy: ResidualPolicy
) -> ResidualVerdict | None:
    """The worst rank of one step; ``None`` if its parts or results were not recorded."""
    judged = judge_expert_step(trace, name, entry, policy)
    if isinstance(judged, str):
        return None
    found = list(judged.values())
    return next((one for one in found if one.verdict == "beyond"), found[0])
