"""How much the audit looked at, counted by hand of a toy engine's steps."""

from __future__ import annotations

from dataclasses import replace

from align.ledger.ledger import audit
from align.ledger.looked import looked_at
from align.ledger.record.types import IndexRecord, Span
from tests.unit.align.ledger.toy import Engine, Request

PROMPTS = (3, 6)


def records() -> list[IndexRecord]:
    """Two prompts of 3 and 6 tokens in one prefill, then two decodes of both; three layers."""
    requests = [Request(f"r{at}", list(range(1, length + 1)), 3) for at, length in enumerate(PROMPTS)]
    found = Engine(requests, layers=3).run().records
    assert [(one.phase, [span.count for span in one.spans]) for one in found] == [
        ("prefill", [3, 6]),
        ("decode", [1, 1]),
        ("decode", [1, 1]),
    ]
    return found


def test_every_slot_table_and_length_is_counted() -> None:
    found = looked_at(records())
    assert found.writes == 3 * (9 + 2 + 2)
    assert (found.tables, found.lengths, found.prefill_lengths) == (6, 6, 2)
    assert found.layer_lengths == 2 * 6
    assert found.idle_rows == 0


def test_dtypes_are_counted_by_forwards_with_one_name_each() -> None:
    first, *rest = records()
    named = [replace(first, dtypes={"tables": "torch.int64", "slots": "int32"})]
    named += [replace(one, dtypes={"tables": "torch.int32"}) for one in rest]
    found = looked_at(named)
    assert (found.table_dtypes, found.slot_dtypes) == ({"int32": 2, "int64": 1}, {"int32": 1})


def test_idle_rows_are_no_requests() -> None:
    first, *_ = records()
    idle = replace(first, spans=(*first.spans[:1], Span("", 0, 6, kind="idle")))
    found = looked_at([idle])
    assert (found.idle_rows, found.tables, found.lengths) == (6, 1, 1)


def test_lengths_of_a_prompt_are_told_from_others_in_a_mixed_step() -> None:
    first, *_ = records()
    mixed = replace(first, phase="mixed", spans=(Span("a", 5, 1), Span("b", 0, 1), Span("c", 4, 2)))
    assert looked_at([mixed]).prefill_lengths == 1, "two lengths were handed over, and the second is of a prompt"


def test_what_could_not_be_replayed_is_not_counted() -> None:
    whole = records()
    broken = [whole[0], replace(whole[1], spans=whole[1].spans * 3), whole[2]]
    assert audit(whole).looked == looked_at(whole)
    found = audit(broken)
    assert any("malformed" in one for one in found.unseen)
    assert found.looked == looked_at(whole[:1])
