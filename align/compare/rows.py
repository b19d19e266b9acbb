"""What a comparison needs of a side, and the rows that a side recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from align.checkpoints.shards import Shard
from align.checkpoints.table import Structure
from align.trace.format import POSITIONS, TOKEN_IDS, StepEntry

CANDIDATE, REFERENCE = "candidate", "reference"


class Recorded(Protocol):
    """What a comparison needs of a side: :class:`align.trace.reader.Trace` and directories of `.pt` files have it.

    A ``structure`` of ``None`` means that :meth:`keys` are whatever somebody called them. Real steps without ``rows``
    are paired by row order.
    """

    @property
    def directory(self) -> Path: ...

    @property
    def manifest(self) -> Mapping[str, Any]: ...

    @property
    def structure(self) -> Structure | None: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def shard(self, rank: int, kind: str) -> Shard | None: ...

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]: ...

    def keys(self, rank: int, step: int) -> frozenset[str]: ...

    def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None: ...

    def accumulated(self, rank: int, which: str, phase: str) -> Mapping[str, torch.Tensor]: ...

    def joined(self, step: int, name: str) -> torch.Tensor | None: ...


class RowKey(NamedTuple):
    """What a row is about, whatever the batch looked like."""

    request: str
    position: int
    occurrence: int


@dataclass(frozen=True)
class Place:
    """Where a side recorded a row: step, index among the step's rows, index among its logits rows if it has one."""

    step: int
    index: int
    head: int | None


@dataclass(frozen=True)
class PairedRow:
    """One row on both sides; ``phase`` is the candidate's."""

    key: RowKey
    phase: str
    candidate: Place
    reference: Place


@dataclass(frozen=True)
class SideRows:
    """One side's rows: places, phases, what it was fed, and which of that it did not record in every step."""

    places: Mapping[RowKey, Place]
    phases: Mapping[RowKey, str]
    fed: Mapping[str, Mapping[RowKey, int]]
    unrecorded: frozenset[str]


def leaders(trace: Recorded) -> tuple[int, ...]:
    """The first rank of each data-parallel group."""
    found: tuple[int, ...] = getattr(trace, "leaders", trace.ranks[:1])
    return found


def ranks_of(trace: Recorded, step: int) -> tuple[int, ...]:
    """Ranks of the data-parallel group that made a step."""
    of_step = getattr(trace, "ranks_of", None)
    found: tuple[int, ...] = trace.ranks if of_step is None else of_step(step)
    return found


def real_steps(trace: Recorded) -> tuple[StepEntry, ...]:
    """Steps that served requests, as the first rank of each data-parallel group saw them."""
    found = [entry for rank in leaders(trace) for entry in trace.steps(rank) if not entry.dummy]
    return tuple(sorted(found, key=lambda entry: entry.step))


def keys_of(trace: Recorded, rank: int, step: int) -> frozenset[str]:
    """What a step holds; nothing if its file is damaged, of which every single record will say why."""
    try:
        return trace.keys(rank, step)
    except Exception:  # whatever is wrong with one file
        return frozenset()


def digested_heads(entry: StepEntry) -> tuple[int, ...]:
    """Of a lean recording: which rows that reach the head, the last of each span, have digests."""
    ends = accumulate(span.count for span in entry.rows)
    return tuple(head for head, end in enumerate(ends) if end - 1 in (entry.digested or ()))


def read_rows(trace: Recorded) -> SideRows:
    """All rows of a side.

    Raises:
        ValueError: the trace cannot be read.
    """
    places: dict[RowKey, Place] = {}
    phases: dict[RowKey, str] = {}
    fed: dict[str, dict[RowKey, int]] = {TOKEN_IDS: {}, POSITIONS: {}}
    unrecorded = set()
    for entry in real_steps(trace):
        keys = [
            RowKey(span.request, position, span.occurrence)
            for span in entry.rows
            for position in range(span.start, span.start + span.count)
        ]
        heads = {row: index for index, row in enumerate(entry.logits_rows)}
        for index, key in enumerate(keys):
            places[key] = Place(entry.step, index, heads.get((key.request, key.position)))
            phases[key] = entry.phase
        for name, values in fed.items():
            try:
                recorded = trace.tensor(ranks_of(trace, entry.step)[0], entry.step, name)
            except ValueError:
                recorded = None  # the step's file is damaged
            if recorded is None or name in entry.failures or recorded.numel() != len(keys):
                unrecorded.add(name)
            else:
                values.update(zip(keys, recorded.reshape(-1).tolist(), strict=True))
    return SideRows(places, phases, fed, frozenset(unrecorded))
