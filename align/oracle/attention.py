"""Attention of one step's rows over the keys and values that the side itself wrote, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from align.checkpoints import recompute
from align.checkpoints.recompute import Exact
from align.oracle.facts import Facts, Window
from align.oracle.history import Histories
from align.oracle.rows import StepRows
from align.oracle.types import Skipped

Tensor = torch.Tensor
F64 = torch.float64
#: Scores that are held at a time (16 MB of float64, about eight times that with all that is derived).
SCORES = 1 << 21


@dataclass(frozen=True)
class Attended:
    """One step: the result, with an infinite magnitude in rows that are not known, and why they are not."""

    exact: Exact
    skipped: tuple[Skipped, ...]


def attend(
    part: StepRows, histories: Histories, facts: Facts, window: Window, sinks: Tensor | None, dtype: torch.dtype
) -> Attended:
    """Recompute one step, whose keys and values ``histories`` has taken in.

    Args:
        part: its first input is the query ``[R, heads, head_dim]``.
        sinks: ``[heads]`` or ``None``.
    """
    query = part.inputs[0]
    value = torch.zeros(query.shape, dtype=F64)
    magnitude = torch.full(query.shape, torch.inf, dtype=F64)
    skipped, start = [], 0
    for span in part.entry.rows:
        mine = ((part.rows >= start) & (part.rows < start + span.count)).nonzero()[:, 0]
        positions = part.rows[mine] - start + span.start
        start += span.count
        if not len(mine):
            continue
        size = None if window.why else window.size
        keys, values, known = histories.read(span.request, positions, size)
        if not bool(known.all()):
            why = "; ".join(dict.fromkeys(histories.missing.values())) or "nobody recorded them"
            count = int((~known).sum())
            skipped.append(Skipped(part.entry.step, count, f"earlier keys of {span.request} are not known: {why}"))
        if window.why and window.size is not None:
            seen = positions < window.size
            hidden = int((known & ~seen).sum())
            if hidden:
                skipped.append(Skipped(part.entry.step, hidden, window.why))
            known = known & seen
        chosen = known.nonzero()[:, 0]
        for here in _rows(positions[chosen], query.shape[1]):
            rows = chosen[here]
            end = int(positions[rows].max()) + 1
            exact = recompute.attention(
                query[mine[rows]],
                positions[rows],
                keys[:end],
                values[:end],
                facts.scale,
                size,
                F64,
                dtype,
                facts.softcap,
                sinks,
            )
            value[mine[rows]], magnitude[mine[rows]] = exact.value, exact.magnitude
    return Attended(Exact(value, magnitude), tuple(skipped))


def _rows(positions: Tensor, heads: int) -> list[slice]:
    """Slices of rows whose scores fit into :data:`SCORES`."""
    found, start = [], 0
    while start < len(positions):
        each = max(1, SCORES // (heads * (int(positions[start:].max()) + 1)))
        found.append(slice(start, min(len(positions), start + each)))
        start += each
    return found
