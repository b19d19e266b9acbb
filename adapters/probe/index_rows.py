"""From the rows that an operator was handed to one row per request, whatever the engine repeats or pads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.base import RowSpan
from align.ledger.record.types import Indices, Span


@dataclass(frozen=True, eq=False)
class Handed:
    """What attention was handed, int64 on the CPU: ``tables`` ``[B, W]``, lengths ``[B]``, ``q_starts`` ``[B + 1]``."""

    tables: Tensor
    q_lens: Tensor
    kv_lens: Tensor
    q_starts: Tensor | None = None

    def same(self, other: Handed) -> bool:
        """Whether another layer was handed the same."""
        if self is other:
            return True
        mine = (self.tables, self.q_lens, self.kv_lens)
        theirs = (other.tables, other.q_lens, other.kv_lens)
        starts = (self.q_starts is None) == (other.q_starts is None)
        if starts and self.q_starts is not None and other.q_starts is not None:
            starts = torch.equal(self.q_starts, other.q_starts)
        return starts and all(map(torch.equal, mine, theirs))


def spans_of(rows: Sequence[RowSpan], written: int, batch: int) -> tuple[Span, ...]:
    """The spans of a step: those of its requests, and of the rows that were written behind them.

    Args:
        rows: of the requests, in batch order.
        written: rows of the keys.
        batch: rows of attention's batch: a padding row of its own each, if as many of them are left over.
    """
    spans = [Span(row.request, row.start, row.count, row.occurrence) for row in rows]
    extra = written - sum(row.count for row in rows)
    if extra > 0:
        single = batch - len(rows) == extra
        spans += [Span("", 0, 1, 0, "padding")] * extra if single else [Span("", 0, extra, 0, "padding")]
    return tuple(spans)


def indices_of(slots: Tensor | None, handed: Handed | None, spans: Sequence[Span]) -> Indices:
    """What a layer was handed, a row per span.

    A batch with a row per token (a prefill over the paged cache, in lmdeploy's dlinfer backend) is folded: each request
    has its first row, or the first that differs from that. Padding spans that the batch has no row for get zeros; a
    request without a row stays without one.
    """
    slots = torch.zeros(0, dtype=torch.int64) if slots is None else slots
    if handed is None:
        none = torch.zeros(0, dtype=torch.int64)
        return Indices(slots, torch.zeros((0, 1), dtype=torch.int64), none, none)
    tables, q_lens, kv_lens, q_starts = handed.tables, handed.q_lens, handed.kv_lens, handed.q_starts
    if tables.dim() != 2:
        return Indices(slots, tables, q_lens, kv_lens, q_starts)
    real = [span for span in spans if span.real]
    tokens = sum(span.count for span in real)
    if (
        len(real) < tokens
        and q_lens.shape[0] in (tokens, sum(span.count for span in spans))
        and bool((q_lens == 1).all())
    ):
        tables, kv_lens = _folded(real, tables, kv_lens)
        q_lens, q_starts = torch.tensor([span.count for span in real]), None
    lacking = len(spans) - len(real)
    if lacking and not real:  # a dummy
        return Indices(slots, _rows(tables, 1), torch.tensor([spans[0].count]), torch.zeros(1, dtype=torch.int64))
    wanted = len(spans) if tables.shape[0] >= len(real) else tables.shape[0]
    return Indices(
        slots,
        _rows(tables, wanted),
        _filled(q_lens, [span.count for span in spans], len(real)),
        _filled(kv_lens, [0] * len(spans), len(real)),
        None if q_starts is None or lacking else q_starts[: len(spans) + 1],
    )


def _folded(spans: Sequence[Span], tables: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """``[tokens, W]`` and ``[tokens]`` to a row per span."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    start = 0
    for span in spans:
        for rows, chosen in zip((tables, kv_lens), found, strict=True):
            mine = rows[start : start + span.count]
            differs = (mine != mine[:1]).reshape(len(mine), -1).any(-1).nonzero()
            chosen.append(mine[int(differs[0]) if len(differs) else 0])
        start += span.count
    return torch.stack(found[0]), torch.stack(found[1])


def _rows(tables: Tensor, count: int) -> Tensor:
    if tables.shape[0] >= count:
        return tables[:count]
    return torch.cat([tables, tables.new_zeros((count - tables.shape[0], tables.shape[1]))])


def _filled(lengths: Tensor, instead: Sequence[int], real: int) -> Tensor:
    """As many as there are spans, if all requests have one."""
    if lengths.shape[0] >= len(instead) or lengths.shape[0] < real:
        return lengths[: len(instead)]
    return torch.cat([lengths, torch.tensor(instead[lengths.shape[0] :], dtype=torch.int64)])
