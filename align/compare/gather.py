"""Reads the paired rows of one checkpoint out of a trace, and brings two sides' shapes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from align.checkpoints.table import parse
from align.compare.rows import Place, Recorded, real_steps

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


def gather(trace: Recorded, name: str, places: Sequence[Place], read: Read | None = None) -> Gathered | None:
    """A checkpoint's rows at the given places, joined over ranks; ``None`` if none of them was recorded.

    ``read`` gives what is to be gathered of a step, ``[rows, …]``; by default the checkpoint's values.

    Rows that reach the head alone (logits, and whatever an engine computed for them only) are found by their place
    there.

    Raises:
        ValueError: a record is damaged, ranks' copies differ, or a tensor has an unexpected number of rows.
    """
    counts = {
        entry.step: (sum(span.count for span in entry.rows), len(entry.logits_rows)) for entry in real_steps(trace)
    }
    steps: dict[int, list[int]] = {}
    for asked, place in enumerate(places):
        steps.setdefault(place.step, []).append(asked)
    pieces: list[torch.Tensor] = []
    rows: list[int] = []
    for step, indices in steps.items():
        value = trace.joined(step, name) if read is None else read(step)
        if value is None:
            continue
        local, kept = _local_rows(name, value, counts[step], step, [(asked, places[asked]) for asked in indices])
        pieces.append(value if local == list(range(value.shape[0])) else value[local])
        rows += kept
    if not rows:
        return None
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if order != list(range(len(rows))):
        whole = whole[order]
    return Gathered(whole, tuple(rows[index] for index in order))


def _local_rows(
    name: str, value: torch.Tensor, counts: tuple[int, int], step: int, places: Sequence[tuple[int, Place]]
) -> tuple[list[int], list[int]]:
    """Indices into ``value`` of the places that it holds, and which of the asked rows these are."""
    tokens, heads = counts
    length = value.shape[0] if value.dim() else 0
    by_head = is_head(name)
    if not by_head and length == tokens:
        return [place.index for _, place in places], [asked for asked, _ in places]
    if length != heads:
        expected = f"{heads} that reach the head" if by_head else f"{tokens}"
        raise ValueError(f"step {step}: {name} has {length} rows; the step has {expected}")
    found = [(place.head, asked) for asked, place in places if place.head is not None]
    return [head for head, _ in found], [asked for _, asked in found]


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
