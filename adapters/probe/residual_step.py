"""One step of an engine as the operator residual sees it: which rows it samples, and what it leaves."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adapters.base import RowSpan
from align.checkpoints.table import Kind

Tensor = torch.Tensor


@dataclass(frozen=True)
class StepResiduals:
    """What one step left.

    Attributes:
        sampled: rows that were recomputed, indices into the step's rows, ascending. The logits are recomputed for all
            their rows instead.
        tensors: for every checkpoint that could be recomputed ``NAME#res_tok`` float32 ``[R, 3]``: sums over channels
            of e², r², e·r, where e is (recorded - recomputed) / magnitude and r is recomputed / magnitude; a row of
            NaN could not be recomputed. ``NAME#res_max`` float32 ``[4]``: largest |e| in units of the unit roundoff,
            its row (index into the step's rows), its flat channel, count of non-finite elements. If there are any, row
            and channel are those of the first of them.
        skipped: kind, or kind at a layer → why it was not recomputed.
    """

    sampled: list[int]
    tensors: dict[str, Tensor]
    skipped: dict[str, str] = field(default_factory=dict)


def sample(rows: Sequence[RowSpan], limit: int, seed: int) -> list[int]:
    """At most ``limit`` rows of a step, ascending: the last and first row of each request, the rest in turn at random.

    If there are more requests than ``limit``, some have none.
    """
    total = sum(span.count for span in rows)
    if total <= limit:
        return list(range(total))
    chance = random.Random(seed)
    queues, start = [], 0
    for span in rows:
        inner = list(range(start + 1, start + span.count - 1))
        chance.shuffle(inner)
        ends = [start + span.count - 1, start] if span.count > 1 else [start] * span.count
        queues.append([*ends, *inner])
        start += span.count
    chance.shuffle(queues)
    chosen: list[int] = []
    turn = 0
    while len(chosen) < limit:
        chosen.extend(queue[turn] for queue in queues if turn < len(queue))
        turn += 1
    return sorted(chosen[:limit])


@dataclass
class Step:
    """One step while it is worked on."""

    rows: Sequence[RowSpan]
    positions: Tensor
    token_ids: Tensor
    values: Mapping[str, Tensor]
    present: Mapping[str, set[int]]
    sampled: Tensor
    logits_rows: Tensor
    number: int = 0

    def chosen(self, kind: Kind) -> Tensor:
        """The rows of the step that are recomputed for this kind."""
        return self.logits_rows if kind.name == "logits" or self.cut(kind) else self.sampled

    def cut(self, kind: Kind) -> bool:
        """Whether only the rows that reach the head were recorded: engines may cut the others before the last norm."""
        rows = len(self.values[kind.name]) if not kind.per_layer else -1
        return kind.name != "logits" and rows == len(self.logits_rows) != len(self.positions)

    def take(self, kind: Kind, rows: Tensor, low: int = 0, high: int = 1) -> Tensor:
        """Recorded values ``[l, R, *channels]`` of layers ``low …`` (of what exists once: one) at ``rows``."""
        recorded = self.values[kind.name]
        tensor = recorded[low:high] if kind.per_layer else recorded[None]
        if kind.name == "logits" or self.cut(kind):
            if rows is not self.logits_rows:
                raise ValueError(f"{kind.name} has the rows that reach the head alone")
            return tensor
        if tensor.shape[1] != len(self.positions):
            raise ValueError(f"{kind.name} has {tensor.shape[1]} rows in a step of {len(self.positions)}")
        return tensor if rows is self.sampled and len(rows) == tensor.shape[1] else tensor.index_select(1, rows)
