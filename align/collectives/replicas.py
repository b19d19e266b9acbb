"""Whether the ranks of a tensor-parallel group hold alike what each of them holds whole, bit by bit.

That is what column-parallel layers read, the residual stream, the norms, and what a reduce gives; key/value heads that
several ranks hold; and the batch itself: token ids, positions and the order of the rows. Copies come from one kernel
with one input, so that any difference is a fault. Where values were not recorded their digests tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from align.checkpoints.shards import Shard
from align.checkpoints.table import Structure, parse
from align.compare.bits import same_bits
from align.compare.rows import Recorded
from align.trace.format import POSITIONS, TOKEN_DIGEST, TOKEN_IDS, TOKEN_SQUARES, StepEntry

#: What the batch is made of.
BATCH = (TOKEN_IDS, POSITIONS)
#: In the order of the engine's own cache, which path A judges; and what only some ranks have.
_LEFT_OUT = ("attn.kv_start_indices", "logits")


@dataclass(frozen=True)
class Unequal:
    """Copies of two ranks that differ.

    Attributes:
        step: the engine's step.
        phase: of it.
        first, rank: the two ranks; ``first`` is the lower.
        rows: which of the step's rows differ, at most 16; empty if that is not known.
        rows_total: how many.
        row_name: ``(request, position)`` of the first.
        order: if the rows of ``rank`` are those of ``first`` in another order: ``rows of rank = rows of first[order]``.
    """

    step: int
    phase: str
    first: int
    rank: int
    rows: tuple[int, ...] = ()
    rows_total: int = 0
    row_name: tuple[str, int] | None = None
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Replicas:
    """What every rank should hold alike.

    Attributes:
        equal: checkpoint → in how many steps and pairs of ranks the copies were equal.
        unequal: checkpoint → where they were not, the first step first.
        unseen: checkpoint → why its copies could not be compared.
    """

    equal: Mapping[str, int] = field(default_factory=dict)
    unequal: Mapping[str, tuple[Unequal, ...]] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)


def groups_of(trace: Recorded) -> list[tuple[int, ...]]:
    """The recorded ranks of each tensor-parallel group: ranks count through one group after the other."""
    structure = trace.structure
    tp = 1 if structure is None else structure.tp
    found: dict[int, list[int]] = defaultdict(list)
    for rank in trace.ranks:
        found[rank // tp].append(rank)
    return [tuple(ranks) for _, ranks in sorted(found.items())]


def judge_replicas(trace: Recorded) -> Replicas:
    """Compare all copies of a trace; nothing without tensor parallelism. One bad record never ends it."""
    structure = trace.structure
    if structure is None or structure.tp == 1:
        return Replicas()
    equal: dict[str, int] = defaultdict(int)
    unequal: dict[str, list[Unequal]] = defaultdict(list)
    unseen: dict[str, str] = {}
    for group in groups_of(trace):
        if len(group) < 2:
            unseen.setdefault("ranks", f"rank {group[0]} alone is in the trace")
            continue
        entries = {rank: {one.step: one for one in trace.steps(rank) if not one.dummy} for rank in group}
        steps = sorted(set(entries[group[0]]).intersection(*entries.values()))
        for name, step, first, rank in _pairs(structure, trace, group, steps):
            entry = entries[rank][step]
            if _divided(name, entry):
                continue
            try:
                found = _compared(trace, name, entries[first][step], entry, first, rank)
            except ValueError as error:
                unseen.setdefault(name, str(error))
                continue
            if isinstance(found, Unequal):
                unequal[name].append(found)
            elif found:
                equal[name] += 1
            else:
                unseen.setdefault(name, f"step {step}: not recorded on ranks {first} and {rank}")
    return Replicas(equal, {name: tuple(found) for name, found in unequal.items()}, unseen)


def _divided(name: str, entry: StepEntry) -> bool:
    """Whether the ranks divide the rows of a checkpoint in this step, so that they hold no copies."""
    return name not in BATCH and entry.part(parse(name).kind.name) is not None


def _pairs(
    structure: Structure, trace: Recorded, group: Sequence[int], steps: Sequence[int]
) -> Iterator[tuple[str, int, int, int]]:
    """``(name, step, rank, rank)`` of copies; each rank is held against the first one with the same part."""
    kinds: dict[str, str | None] = dict.fromkeys(BATCH)
    kinds |= {str(name): name.kind.name for name in structure.names() if name.kind.shard != "partial"}
    for name, kind in kinds.items():
        if kind in _LEFT_OUT:
            continue
        holders: dict[Shard | None, int] = {}
        for rank in group:
            first = holders.setdefault(None if kind is None else trace.shard(rank, kind), rank)
            if first != rank:
                yield from ((name, step, first, rank) for step in steps)


def _compared(trace: Recorded, name: str, ours: StepEntry, theirs: StepEntry, first: int, rank: int) -> Unequal | bool:
    """``True`` if the copies are equal, ``False`` if they were not recorded."""
    if name == TOKEN_IDS and ours.rows != theirs.rows:
        order = _order_of_rows(ours, theirs)
        return Unequal(theirs.step, theirs.phase, first, rank, order=order, rows_total=len(_names(theirs)))
    one, other = (trace.tensor(at, theirs.step, name) for at in (first, rank))
    if one is None or other is None:
        digests = [
            (trace.tensor(first, theirs.step, name + suffix), trace.tensor(rank, theirs.step, name + suffix))
            for suffix in (TOKEN_DIGEST, TOKEN_SQUARES)
        ]
        known = [(a, b) for a, b in digests if a is not None and b is not None]
        if not known:
            return False
        one, other = next(((a, b) for a, b in known if not same_bits(a, b)), known[0])
    if same_bits(one, other):
        return True
    names = _names(theirs)
    if one.shape != other.shape or not one.dim():
        return Unequal(theirs.step, theirs.phase, first, rank)
    differ = (one != other).reshape(len(one), -1).any(1).nonzero().flatten().tolist()
    named = names[differ[0]] if differ and len(names) == len(one) else None
    return Unequal(
        step=theirs.step,
        phase=theirs.phase,
        first=first,
        rank=rank,
        rows=tuple(differ[:16]),
        rows_total=len(differ),
        row_name=named,
        order=row_order(other, one),
    )


def row_order(values: torch.Tensor, rows: torch.Tensor) -> tuple[int, ...]:
    """``order`` with ``values == rows[order]``, bit by bit; empty if they are no permutation of each other.

    Of equal rows those in their own place are taken first.
    """
    if values.shape != rows.shape or not len(rows):
        return ()
    keys = [[row.numpy().tobytes() for row in _bytes(one)] for one in (values, rows)]
    waiting: dict[bytes, list[int]] = defaultdict(list)
    for at, key in enumerate(keys[1]):
        waiting[key].append(at)
    found: dict[int, int] = {}
    for at, key in enumerate(keys[0]):
        if at in waiting[key]:
            waiting[key].remove(at)
            found[at] = at
    for at, key in enumerate(keys[0]):
        if at not in found:
            if not waiting[key]:
                return ()
            found[at] = waiting[key].pop(0)
    return tuple(found[at] for at in range(len(rows)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
    return flat.view(torch.uint8)


def _names(entry: StepEntry) -> list[tuple[str, int]]:
    return [(span.request, at) for span in entry.rows for at in range(span.start, span.start + span.count)]


def _order_of_rows(ours: StepEntry, theirs: StepEntry) -> tuple[int, ...]:
    """The same by the names of the rows."""
    places = {name: at for at, name in enumerate(_names(ours))}
    found = [places.get(name) for name in _names(theirs)]
    known = [at for at in found if at is not None]
    return tuple(known) if sorted(known) == list(range(len(places))) else ()
