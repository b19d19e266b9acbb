"""Which conditions hold, at each point of a run at which more of them can be known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adapters.base import StepRecord
from align.case.schema import Case
from align.checkpoints.table import Structure
from align.compare.rows import real_steps
from align.conditions import LAUNCH, RUN, Condition, SideFacts, evaluate, file_hashes
from align.models.info import ModelInfo
from align.run.outcome import SideOutcome
from align.trace.format import POSITIONS, TOKEN_IDS
from align.trace.reader import Trace

#: What the recorded inputs alone can tell.
_INPUTS = "token_ids"


class Certifier:
    """Judges the conditions of one joint run.

    Args:
        structure: of the model; ``None`` if no table describes it, and then nothing can be judged.
        allow: names of conditions that need not hold.
    """

    def __init__(self, case: Case, info: ModelInfo, structure: Structure | None, allow: Collection[str]) -> None:
        self._case, self._info, self._structure, self._allow = case, info, structure, allow
        self._files: dict[str, str] | None = None

    def files(self, model: Path) -> dict[str, str]:
        """SHA-256 of the checkpoint's files by name, as they lie on the disk."""
        if self._files is None:
            self._files = file_hashes(model)
        return self._files

    def judge(
        self,
        sides: Mapping[str, SideOutcome],
        *,
        ran: bool = False,
        inputs: Mapping[str, Mapping[str, Sequence[int | None]] | None] | None = None,
    ) -> tuple[Condition, ...]:
        """All conditions that can be judged now.

        Args:
            ran: whether the engines have generated once.
            inputs: prompt ids by role and request, as the workers saw them (``None`` for a side that did not record
                them); before anything was recorded that condition is unknown and only informs.
        """
        if self._structure is None:
            return ()
        facts = {
            role: SideFacts(
                engine=side.engine,
                observations=tuple(side.observations),
                steps=() if side.free is None else side.free.steps,
                token_ids=None if inputs is None else inputs[role],
                files=None if side.spec is None else self.files(Path(side.spec.model_path)),
                options={} if side.spec is None else side.spec.options,
            )
            for role, side in sides.items()
        }
        found = evaluate(
            self._case, self._info, self._structure, facts, stage=RUN if ran else LAUNCH, allow=self._allow
        )
        if inputs is not None:
            return found
        return tuple(replace(one, required=False) if one.name == _INPUTS else one for one in found)


def recorded_prompts(trace: Trace) -> dict[str, tuple[int | None, ...]] | None:
    """Prompt ids by request as the first rank's worker of each group saw them, ``None`` for one that no step computed.

    ``None`` as a whole if they were not recorded.

    Raises:
        ValueError: the trace cannot be read.
    """
    lengths = {one["name"]: one["prompt_len"] for one in trace.manifest["requests"]}
    seen: dict[str, dict[int, int]] = {name: {} for name in lengths}
    for entry in real_steps(trace):
        rank = trace.ranks_of(entry.step)[0]
        ids, positions = (trace.tensor(rank, entry.step, key) for key in (TOKEN_IDS, POSITIONS))
        if ids is None:
            return None
        at = 0
        for span in entry.rows:
            for offset in range(span.count):
                position = span.start + offset if positions is None else int(positions[at + offset])
                if position < lengths.get(span.request, 0):
                    seen[span.request][position] = int(ids[at + offset])
            at += span.count
    return {name: tuple(map(seen[name].get, range(length))) for name, length in lengths.items()}


def recorded_steps(trace: Trace) -> tuple[StepRecord, ...]:
    """The steps of a trace as an engine's run reports them."""
    return tuple(
        StepRecord(step=entry.step, phase=entry.phase, rows=entry.rows, forced={}, rank=rank, dummy=entry.dummy)
        for rank in trace.ranks
        for entry in trace.steps(rank)
    )
