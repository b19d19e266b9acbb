"""Reads what a lean recording kept of the operators' own errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from align.checkpoints.table import Structure, parse
from align.compare.residual import WorstSums
from align.trace.format import HEAD_RESIDUAL, TOP_CHANNELS, TOP_ROWS, StepEntry

Named = tuple[str, int]


def worst_sums(
    accumulated: Mapping[str, Tensor], name: str, structure: Structure, entries: Sequence[StepEntry]
) -> tuple[WorstSums, list[Named]] | None:
    """The sums of a checkpoint in one phase, and (request, position) of its worst rows.

    Args:
        accumulated: of the phase.
        entries: the steps of the phase.

    Returns:
        ``None`` if the recording is not lean, or holds nothing of this checkpoint.
    """
    kept = [accumulated.get(name + suffix) for suffix in (TOP_ROWS, TOP_CHANNELS, HEAD_RESIDUAL)]
    rows, channels, heads = kept
    if rows is None or channels is None or heads is None:
        return None
    width = prod(structure.size(axis) for axis in parse(name).kind.axes[1:])
    by_step = {entry.step: entry for entry in entries}
    worst = rows[1:]
    known = worst[~worst.isnan().any(1)]
    named = [_named(by_step.get(int(row[0])), int(row[1])) for row in known]
    return WorstSums(int(rows[0, 0]), rows[0, 2:], known[:, 2:], channels, heads, width), named


def _named(entry: StepEntry | None, index: int) -> Named:
    if entry is None:
        return "", -1
    for span in entry.rows:
        if index < span.count:
            return span.request, span.start + index
        index -= span.count
    return "", -1
