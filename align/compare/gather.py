"""Reads the paired rows of one checkpoint out of a trace, and brings two sides' shapes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from align.checkpoints.table import parse
from align.compare.rows import Place, Recorded, digested_heads, real_steps
from align.trace.format import StepEntry

Read = Callable[[int], torch.Tensor | None]


@dataclass(frozen=True)
class Gathered:
    """One side's values of a checkpoint.

    Attributes:
        tensor: ``[N, *channels]``.
        rows: ``[N]`` indices into the places that were asked for, ascending: those that were recorded.
    """

    tensor: torch.Tensor
    rows: tuple[int, ...]


def gather(
    trace: Recorded, name: str, places: Sequence[Place], read: Read | None = None, digests: bool = False
) -> Gathered | None:
    """A checkpoint's rows at the given places, joined over ranks; ``None`` if none of them was recorded.

    ``read`` gives what is to be gathered of a step, ``[rows, …]``; by default the checkpoint's values. ``digests``: it
    has the rows alone whose digests were kept, where that are not all.

    Rows that reach the head alone (logits, and whatever an engine computed for them only) are found by their place
    there.

    Raises:
        ValueError: a record is damaged, ranks' copies differ, or a tensor has an unexpected number of rows.
    """
    held = {entry.step: _Held.of(entry, digests) for entry in real_steps(trace)}
    steps: dict[int, list[int]] = {}
    for asked, place in enumerate(places):
        steps.setdefault(place.step, []).append(asked)
    pieces: list[torch.Tensor] = []
    rows: list[int] = []
    for step, indices in steps.items():
        value = trace.joined(step, name) if read is None else read(step)
        if value is None:
            continue
        asked_of = [(asked, places[asked]) for asked in indices]
        local, kept = _local_rows(name, value, held[step], step, asked_of)
        pieces.append(value if local == list(range(value.shape[0])) else value[local])
        rows += kept
    if not rows:
        return None
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if order != list(range(len(rows))):
        whole = whole[order]
    return Gathered(whole, tuple(rows[index] for index in order))


@dataclass(frozen=True)
class _Held:
    """Rows of a step: where its tokens, and its rows that reach the head, stand in a record of it."""

    tokens: dict[int, int]
    heads: dict[int, int]

    @classmethod
    def of(cls, entry: StepEntry, digests: bool) -> _Held:
        count = sum(span.count for span in entry.rows)
        if not digests or entry.digested is None:
            every = range(len(entry.logits_rows))
            return cls({row: row for row in range(count)}, {head: head for head in every})
        heads = digested_heads(entry)
        return cls({row: at for at, row in enumerate(entry.digested)}, {head: at for at, head in enumerate(heads)})


def _local_rows(
    name: str, value: torch.Tensor, held: _Held, step: int, places: Sequence[tuple[int, Place]]
) -> tuple[list[int], list[int]]:
    """Indices into ``value`` of the places that it holds, and which of the asked rows these are."""
    length = value.shape[0] if value.dim() else 0
    by_head = is_head(name)
    if not by_head and length == len(held.tokens):
        found = [(held.tokens.get(place.index), asked) for asked, place in places]
    elif length == len(held.heads):
        found = [(None if place.head is None else held.heads.get(place.head), asked) for asked, place in places]
    else:
        expected = f"{len(held.heads)} that reach the head" if by_head else f"{len(held.tokens)}"
        raise ValueError(f"step {step}: {name} has {length} rows; the step has {expected}")
    there = [(at, asked) for at, asked in found if at is not None]
    return [at for at, _ in there], [asked for _, asked in there]


def is_head(name: str) -> bool:
    """Whether a checkpoint has one row for each request and step, not for each token."""
    try:
        return parse(name).kind.axes[0] == "requests"
    except ValueError:
        return False


def reconcile(candidate: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Two views of one shape, and how they were made (empty if the shapes are equal).

    Axes of length 1 in front are dropped, and an axis of heads is split from or joined with the next one.

    Raises:
        ValueError: the shapes differ by more than that.
    """
    if candidate.shape == reference.shape:
        return candidate, reference, ""
    shapes = f"shapes {list(candidate.shape)} and {list(reference.shape)}"
    pairs = [(left, right) for left in _without_leading(candidate) for right in _without_leading(reference)]
    for left, right in pairs:
        if left.shape == right.shape:
            return left, right, f"{shapes} differ by axes of length 1 in front"
    for left, right in pairs:
        if {left.dim(), right.dim()} == {2, 3} and left.shape[0] == right.shape[0] and left.numel() == right.numel():
            shape = max(left.shape, right.shape, key=len)
            return left.reshape(shape), right.reshape(shape), f"{shapes} differ by the split into heads"
    raise ValueError(shapes.replace("shapes", "shapes differ:", 1))


def _without_leading(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and with ever fewer axes of length 1 in front."""
    found = [tensor]
    while found[-1].dim() > 1 and found[-1].shape[0] == 1:
        found.append(found[-1][0])
    return found
