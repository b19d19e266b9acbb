"""What a side recorded of one operator, step by step: its output, its inputs, and which row is which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from align.checkpoints.table import parse
from align.compare.gather import is_head
from align.compare.rows import Recorded, ranks_of, real_steps
from align.oracle.plan import Task
from align.oracle.types import NotObservableError, RowPlace
from align.trace.format import POSITIONS, TOKEN_IDS, USED, StepEntry

Tensor = torch.Tensor
Overrides = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class StepRows:
    """One operator in one step, on one rank if it gives summands.

    Attributes:
        entry: the step.
        rank: -1 for what all ranks hold together.
        rows: int64 ``[R]``, indices into the step's rows.
        output: ``[R, *channels]``; ``None`` if it is not needed.
        inputs: ``[R, …]`` each, in the task's order.
    """

    entry: StepEntry
    rank: int
    rows: Tensor
    output: Tensor | None
    inputs: tuple[Tensor, ...]
    places: tuple[RowPlace, ...] = field(repr=False, default=())


class Reader:
    """Reads a side's records; every failure is a :class:`NotObservableError` that says what is missing."""

    def __init__(self, trace: Recorded) -> None:
        self._trace = trace
        self.entries = real_steps(trace)

    def steps(
        self, task: Task, step: int, overrides: Overrides | None = None, need_output: bool = True
    ) -> list[StepRows]:
        """A task's rows of one step: one part, or one for each rank that holds a summand.

        Raises:
            NotObservableError: something was not recorded, or does not fit.
        """
        entry = self.entry(step)
        ranks = ranks_of(self._trace, step) if task.partial else (-1,)
        return [self._part(task, entry, rank, overrides or {}, need_output) for rank in ranks]

    def entry(self, step: int) -> StepEntry:
        """The step's line.

        Raises:
            NotObservableError: there is none.
        """
        found = next((entry for entry in self.entries if entry.step == step), None)
        if found is None:
            raise NotObservableError(f"step {step} was not recorded")
        return found

    def _part(self, task: Task, entry: StepEntry, rank: int, overrides: Overrides, need_output: bool) -> StepRows:
        names = [str(one) for one in task.inputs]
        if task.operator == "all_reduce":
            inputs = self._summands(names[0], entry, overrides)
        else:
            inputs = [self._input(name, entry, rank, overrides) for name in names]
        output = self.value(str(task.name), entry, rank, {}) if need_output else None
        rows = self._rows(str(task.name), entry, output, inputs)
        taken = tuple(self._at(tensor, rows, entry) for tensor in inputs)
        return StepRows(entry, rank, rows, output, taken, tuple(self._places(entry, rank, rows)))

    def _input(self, name: str, entry: StepEntry, rank: int, overrides: Overrides) -> Tensor:
        """What an operator read: where the routing was replayed, not what the router itself chose."""
        if name.endswith(".moe.topk_ids") and name not in overrides:
            with suppress(NotObservableError):  # usually a router's own choice was used
                return self.value(f"{name}{USED}", entry, rank, {})
        return self.value(name, entry, rank, overrides)

    def _summands(self, name: str, entry: StepEntry, overrides: Overrides) -> list[Tensor]:
        """What the ranks' reduce adds up; a sum that was given is one summand."""
        if name in overrides:
            return [overrides[name]]
        return [self.value(name, entry, rank, overrides) for rank in ranks_of(self._trace, entry.step)]

    def value(self, name: str, entry: StepEntry, rank: int, overrides: Overrides) -> Tensor:
        """A record of a step, joined over the ranks unless one is named.

        Raises:
            NotObservableError: says why it is not there.
        """
        if name in overrides:
            return self._share(name, overrides[name], rank)
        try:
            found = self._trace.joined(entry.step, name) if rank < 0 else self._trace.tensor(rank, entry.step, name)
        except ValueError as error:
            raise NotObservableError(str(error)) from error
        if found is None:
            where = "" if rank < 0 else f" on rank {rank}"
            failure = f": {entry.failures[name]}" if name in entry.failures else ""
            raise NotObservableError(f"the values of {name} were not recorded{where}{failure}")
        return found

    def _share(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a whole tensor."""
        kind = parse(name).kind
        shard = self._trace.shard(rank, kind.name) if rank >= 0 else None
        return whole if shard is None else whole.narrow(kind.axes.index(kind.shard), shard.start, shard.count)

    def _rows(self, name: str, entry: StepEntry, output: Tensor | None, inputs: list[Tensor]) -> Tensor:
        """Which rows of the step an operator's output has."""
        total, heads = sum(span.count for span in entry.rows), len(entry.logits_rows)
        length = len(output) if output is not None else min((len(one) for one in inputs), default=total)
        if is_head(name) or (length == heads != total):
            if length != heads and output is not None:
                raise NotObservableError(f"{name} has {length} rows; {heads} reach the head")
            return self._head_rows(entry)
        if length != total:
            raise NotObservableError(f"{name} has {length} rows; the step has {total}")
        return torch.arange(total)

    def _head_rows(self, entry: StepEntry) -> Tensor:
        index, start = {}, 0
        for span in entry.rows:
            index.update({(span.request, span.start + at): start + at for at in range(span.count)})
            start += span.count
        missing = [row for row in entry.logits_rows if row not in index]
        if missing:
            raise NotObservableError(
                f"logits of {missing[0][0]} position {missing[0][1]}, which the step does not have"
            )
        return torch.tensor([index[row] for row in entry.logits_rows], dtype=torch.int64)

    def _at(self, tensor: Tensor, rows: Tensor, entry: StepEntry) -> Tensor:
        total = sum(span.count for span in entry.rows)
        if len(tensor) == total:
            return tensor if len(rows) == total else tensor[rows]
        if len(tensor) == len(rows) == len(entry.logits_rows):
            return tensor
        raise NotObservableError(f"an input has {len(tensor)} rows; the step has {total}")

    def _places(self, entry: StepEntry, rank: int, rows: Tensor) -> Iterator[RowPlace]:
        named = [(span.request, span.start + at) for span in entry.rows for at in range(span.count)]
        for row in rows.tolist():
            request, position = named[row]
            yield RowPlace(request, position, entry.step, rank)

    def fed(self, key: str, entry: StepEntry, overrides: Overrides) -> Tensor:
        """Token ids or positions of a step, int64 ``[T]``.

        Raises:
            NotObservableError: not recorded, or of another length.
        """
        found = self.value_of_key(key, entry, overrides)
        total = sum(span.count for span in entry.rows)
        if found is None:
            what = {TOKEN_IDS: "token ids", POSITIONS: "positions"}[key]
            raise NotObservableError(f"the {what} were not recorded")
        if found.numel() != total:
            raise NotObservableError(f"{key} has {found.numel()} values; the step has {total} rows")
        return found.reshape(-1).long()

    def value_of_key(self, key: str, entry: StepEntry, overrides: Overrides) -> Tensor | None:
        if key in overrides:
            return overrides[key]
        try:
            return self._trace.tensor(ranks_of(self._trace, entry.step)[0], entry.step, key)
        except ValueError as error:
            raise NotObservableError(str(error)) from error
