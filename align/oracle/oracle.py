"""The oracle: each operator of one side recomputed in float64 from what that side recorded and the weights on disk.

One checkpoint is worked on at a time, in chunks, so that memory does not grow with the model; a weight is read when its
operator is recomputed and dropped afterwards. What cannot be recomputed is said, and never ends the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from align.checkpoints.recompute import Exact
from align.checkpoints.table import Structure
from align.compare.residual import ResidualPolicy
from align.compare.rows import Recorded
from align.errors import UserError
from align.models.info import read_info
from align.oracle.attention import attend
from align.oracle.facts import Facts, facts_of
from align.oracle.fold import Fold
from align.oracle.history import Histories
from align.oracle.operators import Operators
from align.oracle.plan import Task, bound_of, plan
from align.oracle.routers import judge_choice
from align.oracle.rows import Overrides, Reader, StepRows
from align.oracle.types import NotObservableError, OracleResult, Skipped
from align.oracle.weights import CheckpointWeights
from align.trace.format import POSITIONS, TOKEN_IDS

Tensor = torch.Tensor
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FED = {"embedding": TOKEN_IDS, "rope": POSITIONS}
#: What a record that does not fit may raise inside an operator.
_BROKEN = (ValueError, RuntimeError, IndexError, TypeError)


class Oracle:
    """Judges the operators of one side.

    Args:
        trace: what the side recorded.
        model_dir: the checkpoint's directory; by default the one that the trace names. Without the files operators
            that have weights are not observable.
        structure: by default the trace's.
        policy: what is allowed; by default that of the trace's dtype.

    Raises:
        UserError: the directory holds another checkpoint than the trace's, or damaged files.
        ValueError: the trace does not say what model it is of.
    """

    def __init__(
        self,
        trace: Recorded,
        model_dir: Path | None = None,
        *,
        structure: Structure | None = None,
        policy: ResidualPolicy | None = None,
    ) -> None:
        found = structure or trace.structure
        if found is None or trace.dtype not in _DTYPES:
            raise ValueError(f"{trace.directory} does not say what model and dtype it is of")
        self.structure: Structure = found
        self.facts: Facts = facts_of(trace.manifest.get("model") or {}, self.structure)
        self.policy = policy or ResidualPolicy.for_dtype(trace.dtype)
        self.dtype = _DTYPES[trace.dtype]
        self._trace, self._reader = trace, Reader(trace)
        directory, missing = _directory(trace, model_dir)
        self.weights = None if directory is None else CheckpointWeights(directory, self.structure, self.dtype)
        self._operators = Operators(self.structure, self.facts, self.weights, missing)

    def close(self) -> None:
        """Close the checkpoint's files."""
        if self.weights is not None:
            self.weights.close()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- judging

    def judge(self, names: Iterable[str] | None = None, steps: Iterable[int] | None = None) -> list[OracleResult]:
        """Judge checkpoints, all by default, in the order in which the model computes them.

        Args:
            steps: rows of these steps alone; the keys of earlier steps are read all the same.

        Raises:
            ValueError: a name that the model does not have.
        """
        return list(self.each(names, steps))

    def each(self, names: Iterable[str] | None = None, steps: Iterable[int] | None = None) -> Iterator[OracleResult]:
        """As :meth:`judge`, one result at a time; profiles of earlier ones need not be kept."""
        wanted = [str(name) for name in self.structure.names()] if names is None else list(names)
        chosen = None if steps is None else frozenset(steps)
        for task in plan(self.structure, self.facts, wanted):
            began = time.perf_counter()
            try:
                result = self._judge(task, chosen)
            except _BROKEN as error:
                result = _not_observable(task, f"{type(error).__name__}: {error}")
            yield replace(result, seconds=time.perf_counter() - began)

    def _judge(self, task: Task, steps: frozenset[int] | None) -> OracleResult:
        if task.why:
            return _not_observable(task, task.why)
        parts, skipped = self._parts(task, steps)
        if not parts:
            reasons = list(dict.fromkeys(one.why for one in skipped)) or ["no step was recorded"]
            return _not_observable(task, "; ".join(reasons), skipped)
        if task.operator == "topk_ids":
            return judge_choice(task, parts, self._operators, self.dtype, self.policy, skipped)
        output = parts[0].output
        assert output is not None
        bound = bound_of(task, self.structure)
        policy = replace(self.policy, operators={bound.operator: bound, **self.policy.operators})
        allowed = policy.operators[bound.operator].max_roundings
        places = [place for part in parts for place in part.places]
        fold = Fold(len(places), output.shape[1:], self.dtype, allowed)
        notes: list[str] = []
        try:
            for rows, exact, recorded in self._chunks(task, parts, skipped, notes):
                fold.add(rows, exact, recorded)
        except _BROKEN as error:
            skipped.append(Skipped(-1, -1, str(error)))
        return fold.result(str(task.name), policy, task.operator, places, skipped, notes)

    def _parts(self, task: Task, steps: frozenset[int] | None) -> tuple[list[StepRows], list[Skipped]]:
        """What was recorded, ordered by rank and step; channels of all parts alike."""
        parts: list[StepRows] = []
        skipped: list[Skipped] = []
        for entry in self._reader.entries:
            if steps is not None and entry.step not in steps:
                continue
            try:
                parts += self._reader.steps(task, entry.step)
            except NotObservableError as error:
                skipped.append(Skipped(entry.step, sum(span.count for span in entry.rows), str(error)))
        missing = sorted((steps or frozenset()) - {entry.step for entry in self._reader.entries})
        skipped += [Skipped(step, -1, f"step {step} was not recorded") for step in missing]
        alike = [part for part in parts if _shape(part) == _shape(parts[0])]
        skipped += [
            Skipped(part.entry.step, len(part.rows), f"its shape {_shape(part)} is not {_shape(parts[0])}")
            for part in parts
            if part not in alike
        ]
        return sorted(alike, key=lambda part: (part.rank, part.entry.step)), skipped

    def _chunks(
        self, task: Task, parts: Sequence[StepRows], skipped: list[Skipped], notes: list[str]
    ) -> Iterator[tuple[Tensor, Exact, Tensor]]:
        """``(places, results, records)``; what is skipped on the way is added to ``skipped``."""
        starts = torch.tensor([0, *(len(part.rows) for part in parts)]).cumsum(0).tolist()
        if task.operator == "attention":
            by_step = {part.entry.step: (part, start) for part, start in zip(parts, starts, strict=False)}
            for part, exact in self._attention(task, [part.entry.step for part in parts], skipped, by_step):
                yield torch.arange(len(part.rows)) + by_step[part.entry.step][1], exact, _output(part)
            return
        if task.operator in _FED:
            for part, start in zip(parts, starts, strict=False):
                try:
                    fed = self._fed(task, part, {}, notes)
                    for here, exact in self._operators.run(task, part.inputs, part.rank, fed):
                        yield torch.arange(here.start, here.stop) + start, exact, _output(part)[here]
                except NotObservableError as error:
                    skipped.append(Skipped(part.entry.step, len(part.rows), str(error)))
            return
        for rank in dict.fromkeys(part.rank for part in parts):  # all steps share one pass over the weights
            mine = [(part, start) for part, start in zip(parts, starts, strict=False) if part.rank == rank]
            inputs = tuple(torch.cat(column) for column in zip(*(part.inputs for part, _ in mine), strict=True))
            records, first = torch.cat([_output(part) for part, _ in mine]), mine[0][1]
            for here, exact in self._operators.run(task, inputs, rank, None):
                shaped = Exact(exact.value.view(-1, *records.shape[1:]), exact.magnitude.view(-1, *records.shape[1:]))
                yield torch.arange(here.start, here.stop) + first, shaped, records[here]

    def _fed(self, task: Task, part: StepRows, overrides: Overrides, notes: list[str]) -> Tensor:
        key = _FED[task.operator]
        try:
            return self._reader.fed(key, part.entry, overrides)[part.rows]
        except NotObservableError:
            if key == TOKEN_IDS or self._reader.value_of_key(key, part.entry, overrides) is not None:
                raise
        notes.append("positions were not recorded: those of the schedule were taken")
        return torch.tensor([place.position for place in part.places], dtype=torch.int64)

    def _attention(
        self,
        task: Task,
        steps: Sequence[int],
        skipped: list[Skipped],
        parts: dict[int, tuple[StepRows, int]],
        overrides: Overrides | None = None,
    ) -> Iterator[tuple[StepRows, Exact]]:
        """Each wanted step's result; all earlier steps give their keys. ``overrides`` count in the last step."""
        layer = task.name.layer
        assert layer is not None
        histories, window = Histories(self._reader, layer), self.facts.windows[layer]
        sinks = self._operators.sinks(layer)
        for entry in self._reader.entries:
            if entry.step > max(steps):
                break
            histories.advance(entry, (overrides or {}) if entry.step == max(steps) else {})
            if entry.step in parts:
                part = parts[entry.step][0]
                found = attend(part, histories, self.facts, window, sinks, self.dtype)
                skipped += found.skipped
                yield part, found.exact

    # --------------------------------------------------------------------------------------------- recomputing

    def recompute(self, name: str, step: int, inputs: Overrides | None = None) -> Exact:
        """The float64 result of one operator in one step, ``[rows, *channels]`` in the step's order of rows.

        Rows that are not known (attention to keys that nobody recorded) have an infinite magnitude. Summands of ranks
        are added up.

        Args:
            inputs: tensors that take the place of recorded ones of this step, by checkpoint name or as ``token_ids``
                and ``positions``; whole, in the recorded shape. Keys of earlier steps stay the side's own.

        Raises:
            NotObservableError: says what is missing.
            ValueError: a name that the model does not have.
        """
        (task,) = plan(self.structure, self.facts, [name])
        if task.why or task.operator == "topk_ids":
            raise NotObservableError(task.why or "a choice has no float64 result")
        overrides = dict(inputs or {})
        parts = self._reader.steps(task, step, overrides, need_output=False)
        if task.operator == "attention":
            found = [exact for _, exact in self._attention(task, [step], [], {step: (parts[0], 0)}, overrides)]
            return found[0]
        results = []
        for part in parts:
            fed = self._fed(task, part, overrides, []) if task.operator in _FED else None
            try:
                chunks = [exact for _, exact in self._operators.run(task, part.inputs, part.rank, fed)]
            except (RuntimeError, IndexError, TypeError) as error:
                raise NotObservableError(f"{name}: {error}") from error
            results.append(_joined(chunks))
        value = torch.stack([one.value for one in results]).sum(0)
        magnitude = torch.stack([one.magnitude for one in results]).sum(0)
        return Exact(self._shaped(task, value), self._shaped(task, magnitude))

    def _shaped(self, task: Task, flat: Tensor) -> Tensor:
        """Products are flat; their canonical axes are the structure's."""
        if task.operator != "linear" or len(task.name.kind.axes) == 2:
            return flat
        return flat.view(len(flat), *(self.structure.size(axis) for axis in task.name.kind.axes[1:]))


def _joined(chunks: Sequence[Exact]) -> Exact:
    return Exact(torch.cat([one.value for one in chunks]), torch.cat([one.magnitude for one in chunks]))


def _output(part: StepRows) -> Tensor:
    assert part.output is not None
    return part.output


def _shape(part: StepRows) -> list[int]:
    return list(_output(part).shape[1:])


def _not_observable(task: Task, why: str, skipped: Iterable[Skipped] = ()) -> OracleResult:
    return OracleResult(str(task.name), task.operator, "not observable", why, skipped=tuple(skipped))


def _directory(trace: Recorded, given: Path | None) -> tuple[Path | None, str]:
    """The checkpoint's directory, or why there is none."""
    about = trace.manifest.get("model_info") or {}
    named = about.get("path")
    directory = given or (Path(named) if named else None)
    if directory is None:
        return None, "the trace does not say where the checkpoint's files are"
    if given is None and not directory.is_dir():
        return None, f"the checkpoint's files are not at {directory}"
    wanted = about.get("fingerprint")
    if wanted and read_info(directory).fingerprint != wanted:
        raise UserError(
            f"{directory} is not the checkpoint that was recorded: its files differ in name or size",
            "give the directory of the checkpoint that the run used",
        )
    return directory, ""
