"""How much the audit looked at: without faults a number without this says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from align.ledger.record.types import IndexRecord, Span


@dataclass(frozen=True)
class Looked:
    """Counts over all records that were replayed: all ranks, all runs of a launch.

    Attributes:
        writes: slots of key rows, one for each row and layer, padding and dummies included.
        tables: block tables of requests, one for each request and forward.
        lengths: key lengths of requests, likewise.
        prefill_lengths: of these such as a prompt, or a part of one, leaves.
        layer_lengths: lengths that a layer after the first was handed, compared with the first layer's.
        table_dtypes, slot_dtypes: dtype as handed to the operators → forwards.
        idle_rows: rows of dummies that keep data-parallel groups without requests in step.
    """

    writes: int = 0
    tables: int = 0
    lengths: int = 0
    prefill_lengths: int = 0
    layer_lengths: int = 0
    table_dtypes: dict[str, int] = field(default_factory=dict)
    slot_dtypes: dict[str, int] = field(default_factory=dict)
    idle_rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def looked_at(records: Iterable[IndexRecord]) -> Looked:
    """Of records that were replayed."""
    counts: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {"tables": Counter(), "slots": Counter()}
    for record in records:
        counts["writes"] += sum(int(record.at(layer).slots.shape[0]) for layer in range(record.layers))
        real = [row for row, span in enumerate(record.spans) if span.real]
        tables = record.base.tables
        counts["tables"] += sum(row < tables.shape[0] for row in real) if tables.dim() == 2 else 0
        handed = [row for row in real if row < record.base.kv_lens.shape[0]]
        counts["lengths"] += len(handed)
        counts["prefill_lengths"] += sum(_of_a_prompt(record, record.spans[row]) for row in handed)
        counts["layer_lengths"] += sum(_compared(record, layer, handed) for layer in range(1, record.layers))
        counts["idle_rows"] += sum(span.count for span in record.spans if span.kind == "idle")
        for name, found in dtypes.items():
            if name in record.dtypes:
                found[record.dtypes[name].removeprefix("torch.")] += 1
    return Looked(table_dtypes=_sorted(dtypes["tables"]), slot_dtypes=_sorted(dtypes["slots"]), **counts)


def _of_a_prompt(record: IndexRecord, span: Span) -> bool:
    """In a mixed step a row that begins, or computes several positions, belongs to a prompt."""
    return record.phase == "prefill" or (record.phase == "mixed" and (span.start == 0 or span.count > 1))


def _compared(record: IndexRecord, layer: int, rows: Sequence[int]) -> int:
    return sum(row < record.at(layer).kv_lens.shape[0] for row in rows)


def _sorted(found: Counter[str]) -> dict[str, int]:
    return dict(sorted(found.items()))
