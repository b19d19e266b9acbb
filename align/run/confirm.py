"""Makes a transplant with the engines of a running session; :mod:`align.walk` plans and judges it.

The replays leave records of their own below ``SIDE/confirm``, with nothing in them but what is read here; the run's
traces stay as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from adapters.base import SIDES, Generation
from adapters.probe.spec import CaptureSpec, TransplantSpec
from adapters.probe.transplant import OTHER_SUM, SUMMANDS, Replaced, read_replaced, write_tensors
from align.checkpoints.table import Structure, parse
from align.compare.bits import same_bits
from align.compare.gather import gather
from align.compare.pairing import pair_rows
from align.compare.rows import RowKey, read_rows, real_steps
from align.errors import UserError
from align.findings import Finding
from align.run.judge import one_thread, policy_for
from align.run.session import Session
from align.run.traces import open_trace
from align.trace.format import MANIFEST
from align.trace.reader import Trace
from align.walk.recovery import (
    Local,
    Reading,
    TransplantResult,
    floor_of,
    judge,
    not_possible,
    read_point,
)
from align.walk.transplant import Accusation, NotPossibleError, Plan, plan_transplant

#: Below a side's directory.
CONFIRM = "confirm"
GIVEN, INPUTS, OUTPUT = "given", "inputs", "output"


class Confirmer:
    """Transplants between the sides of a session whose engines are up.

    Args:
        traces: by role, where the run's records lie; they hold a manifest each.
        along: what the replays follow; by default what the reference generated.
        routing: experts that the candidate uses in its replays instead of its own choice.
    """

    def __init__(
        self,
        session: Session,
        traces: Mapping[str, Path],
        along: tuple[Generation, ...] | None,
        routing: TransplantSpec | None = None,
    ) -> None:
        self._session, self._traces, self._along = session, traces, along
        self._routing = routing
        self._count = 0

    def confirm(self, accusation: Accusation) -> TransplantResult:
        """Make the transplant. Whatever stops it is a result of its own and never an error of the run."""
        self._count += 1
        try:
            with one_thread():
                return self._confirm(accusation)
        except NotPossibleError as error:
            return not_possible(accusation, str(error))
        except UserError as error:
            return not_possible(accusation, error.message)
        except (OSError, ValueError) as error:
            return not_possible(accusation, f"{type(error).__name__}: {error}")

    def _place(self, role: str, name: str) -> Path:
        return self._session.directories[role] / CONFIRM / str(self._count) / name

    def _confirm(self, accusation: Accusation) -> TransplantResult:
        side = accusation.side
        with ExitStack() as stack:
            traces = {role: stack.enter_context(closing(open_trace(path))) for role, path in self._traces.items()}
            structure = traces[side].structure
            plan = plan_transplant(structure, accusation)
            if not all(_has(traces[role], name) for role in SIDES for name in plan.names):
                traces = {role: stack.enter_context(one) for role, one in self._record(plan).items()}
            other = next(role for role in SIDES if role != side)
            rows = [row.key for row in pair_rows(traces["candidate"], traces["reference"]).rows]
            theirs = {name: _rows(traces[other], name, rows) for name in plan.names}
            bare = [name for name, found in theirs.items() if not found]
            if bare:
                raise NotPossibleError(f"the {other} recorded no values of {', '.join(bare)}")
            runs = {"none": traces[side]}
            replaced: dict[str, Replaced] = {}
            for kind, names in ((INPUTS, plan.inputs), (OUTPUT, (*plan.inputs, *plan.outputs))):
                if not names:
                    runs[kind] = traces[side]
                    continue
                said = self._replay(plan, kind, names, theirs)
                replaced[kind] = _checked(plan, kind, names, said, theirs, structure.tp)
                runs[kind] = stack.enter_context(self._opened(self._place(side, kind), side))
            floor = floor_of(policy_for(traces["reference"], "derived"))
            readings: list[Reading] = []
            for point in plan.points:
                ours = [_rows(runs[kind], point, rows) for kind in ("none", INPUTS, OUTPUT)]
                common = [key for key in theirs[point] if all(key in one for one in ours)]
                if common:
                    b, a, with_inputs, with_output = (
                        torch.stack([one[key] for key in common]) for one in (theirs[point], *ours)
                    )
                    readings.append(read_point(point, floor(point), b, a, with_inputs, with_output))
            local = _local(theirs[plan.output], _rows(runs[INPUTS], plan.output, rows))
            last = replaced[OUTPUT]
            notes = (*plan.notes, *(f"{name}: {note}" for name, note in last.notes.items()))
            return replace(
                judge(accusation, plan, tuple(readings), local), rows=last.rows, ranks=structure.tp, notes=notes
            )

    def _record(self, plan: Plan) -> dict[str, _Opened]:
        """Record on both sides what the run's traces do not hold."""
        places = {role: self._place(role, GIVEN) for role in SIDES}
        captures = {role: self._capture(role, place, plan.names) for role, place in places.items()}
        self._session.replay_apart(captures, self._along)
        return {role: self._opened(place, role) for role, place in places.items()}

    def _opened(self, directory: Path, role: str) -> _Opened:
        """The records of a replay, which is described by the manifest of the run's own."""
        shutil.copyfile(self._traces[role] / MANIFEST, directory / MANIFEST)
        return closing(open_trace(directory))

    def _replay(
        self, plan: Plan, kind: str, names: Sequence[str], theirs: Mapping[str, Mapping[RowKey, Tensor]]
    ) -> dict[int, Replaced]:
        """Replay the accused side with the other side's tensors; what each rank replaced."""
        place = self._place(plan.side, kind)
        given = place.with_name(f"{kind}-tensors").absolute()
        rows = {name: list(theirs[name]) for name in names}
        tensors = {name: torch.stack(list(theirs[name].values())) for name in names}
        for name in names:
            for suffix, part in zip(SUMMANDS, _summands(plan, name, theirs), strict=False):
                tensors[name + suffix] = part
        write_tensors(given, tensors, rows)
        values = (*plan.points, plan.output)
        look = replace(self._capture(plan.side, place, values), transplant=TransplantSpec(str(given), tuple(names)))
        self._session.replay_apart({plan.side: look}, self._along)
        return read_replaced(given)

    def _capture(self, role: str, place: Path, values: Sequence[str]) -> CaptureSpec:
        wanted, routing = tuple(dict.fromkeys(values)), self._routing if role == "candidate" else None
        return CaptureSpec(str(place.absolute()), values=wanted, digest=False, residual=False, routing=routing)


_Opened = closing[Trace]


def _has(trace: Trace, name: str) -> bool:
    """Whether a trace holds a checkpoint's values in every real step, on whichever rank."""
    steps = [entry.step for entry in real_steps(trace)]
    return all(any(name in trace.keys(rank, step) for rank in trace.ranks_of(step)) for step in steps)


def _rows(trace: Trace, name: str, keys: Sequence[RowKey]) -> dict[RowKey, Tensor]:
    """A checkpoint's values by row, joined over ranks; rows that were not recorded are absent."""
    places = read_rows(trace).places
    known = [key for key in keys if key in places]
    found = gather(trace, name, [places[key] for key in known])
    if found is None:
        return {}
    return {known[row]: found.tensor[index] for index, row in enumerate(found.rows)}


def _summands(plan: Plan, name: str, theirs: Mapping[str, Mapping[RowKey, Tensor]]) -> tuple[Tensor, ...]:
    """The summands of a residual, if the other side's sum is what rounding makes of them; otherwise nothing."""
    parts = plan.summands.get(name)
    if parts is None or not all(key in theirs[part] for part in parts for key in theirs[name]):
        return ()
    stream, added = (torch.stack([theirs[part][key] for key in theirs[name]]) for part in parts)
    whole = torch.stack(list(theirs[name].values()))
    return (stream, added) if torch.equal((stream.float() + added.float()).to(whole.dtype), whole) else ()


def _local(theirs: Mapping[RowKey, Tensor], ours: Mapping[RowKey, Tensor]) -> Local | None:
    common = [key for key in theirs if key in ours]
    if not common:
        return None
    reference, mine = (torch.stack([one[key] for key in common]) for one in (theirs, ours))
    gap = float((mine.double() - reference.double()).norm())
    size = float(reference.double().norm())
    return Local(same_bits(mine, reference), gap / size if size else float("inf") if gap else 0.0)


def _checked(
    plan: Plan,
    kind: str,
    names: Sequence[str],
    said: Mapping[int, Replaced],
    theirs: Mapping[str, Mapping[RowKey, Tensor]],
    ranks: int,
) -> Replaced:
    """What the ranks of a tensor-parallel group (``ranks`` of them) replaced, if each of them replaced every row.

    Raises:
        NotPossibleError: one did not; a transplant of nothing must not pass for one without effect.
    """
    for rank in range(ranks):
        # Every data-parallel group replaces the rows of its own requests.
        groups = {one.rank: one for one in said.values() if one.rank % ranks == rank}
        if not groups:
            raise NotPossibleError(f"rank {rank} did not say what it replaced ({kind})")
        for name in names:
            for place, one in groups.items():
                if name in one.failures:
                    raise NotPossibleError(f"{name} on rank {place}: {one.failures[name]}")
                if one.notes.get(name) == OTHER_SUM and name in plan.inputs:
                    raise NotPossibleError(f"{name} on rank {place}: {OTHER_SUM}")
            replaced = sum(one.rows[name] for one in groups.values())
            # The head may be computed on the sampling rank alone.
            wanted = len(theirs[name]) if rank == 0 or parse(name).kind.axes[0] == "tokens" else replaced
            if replaced != wanted:
                raise NotPossibleError(f"{name} on rank {rank}: {replaced} of {wanted} rows were replaced ({kind})")
    first = said[min(said)]
    rows = {name: sum(one.rows[name] for one in said.values() if one.rank % ranks == 0) for name in names}
    return replace(first, rows={**first.rows, **rows})


def check_accusations(accusations: Iterable[Accusation], structure: Structure | None) -> None:
    """Refuse accusations that no transplant can answer, before anything is started.

    Raises:
        UserError: no tensors are recorded, the model has no such checkpoint, or it cannot be replaced.
    """
    for one in accusations:
        text = f"--confirm {one.side}:{one.checkpoint}"
        if structure is None:
            raise UserError(f"{text} needs tensors", "leave out --no-tensors")
        try:
            plan_transplant(structure, one)
        except NotPossibleError as error:
            raise UserError(f"{text} is not possible: {error}", "align taps ENGINE lists the checkpoints") from None


def tested(finding: Finding, accusation: Accusation, result: TransplantResult) -> Finding:
    """The finding that was put to the test says what came of it."""
    if (finding.side, finding.checkpoint) != (accusation.side, accusation.checkpoint):
        return finding
    return replace(finding, evidence={**finding.evidence, "transplant": result.to_dict()})
