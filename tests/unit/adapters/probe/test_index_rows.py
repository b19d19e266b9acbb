"""One row per request, whatever the engine repeats or pads."""

from __future__ import annotations

import pytest
import torch

from adapters.base import RowSpan
from adapters.probe.index_rows import Handed, indices_of, spans_of
from align.ledger.record.types import Span

T = torch.tensor
ROWS = (RowSpan("a", 4, 3), RowSpan("b", 0, 2))
SPANS = (Span("a", 4, 3), Span("b", 0, 2))
SLOTS = T([4, 5, 6, 8, 9])


def test_as_many_rows_as_requests_are_taken_as_they_are() -> None:
    handed = Handed(T([[1, 2], [3, 0]]), T([3, 2]), T([7, 2]), T([0, 3, 5]))
    found = indices_of(SLOTS, handed, SPANS)
    assert found.tables.tolist() == [[1, 2], [3, 0]] and found.kv_lens.tolist() == [7, 2]
    assert found.q_lens.tolist() == [3, 2] and found.q_starts is not None and found.q_starts.tolist() == [0, 3, 5]


def test_a_row_per_token_is_folded() -> None:
    handed = Handed(T([[1, 2]] * 3 + [[3, 0]] * 2), T([1] * 5), T([7, 7, 7, 2, 2]))
    found = indices_of(SLOTS, handed, SPANS)
    assert found.tables.tolist() == [[1, 2], [3, 0]] and found.kv_lens.tolist() == [7, 2]
    assert found.q_lens.tolist() == [3, 2] and found.q_starts is None


def test_a_token_that_was_handed_something_else_shows() -> None:
    tables, lengths = T([[1, 2], [1, 2], [9, 2], [3, 0], [3, 0]]), T([7, 7, 7, 2, 5])
    found = indices_of(SLOTS, Handed(tables, T([1] * 5), lengths), SPANS)
    assert found.tables.tolist() == [[9, 2], [3, 0]] and found.kv_lens.tolist() == [7, 5]


def test_one_token_each_is_no_row_per_token() -> None:
    spans = (Span("a", 4, 1), Span("b", 2, 1))
    found = indices_of(T([4, 8]), Handed(T([[1, 2], [3, 0]]), T([1, 1]), T([5, 3])), spans)
    assert found.tables.tolist() == [[1, 2], [3, 0]] and found.kv_lens.tolist() == [5, 3]


@pytest.mark.parametrize(
    ("written", "batch", "counts"), [(5, 2, []), (8, 5, [1, 1, 1]), (8, 2, [3]), (8, 3, [3]), (4, 2, [])]
)
def test_rows_behind_the_requests_are_padding(written: int, batch: int, counts: list[int]) -> None:
    spans = spans_of(ROWS, written, batch)
    assert spans[:2] == SPANS
    assert [(one.kind, one.count) for one in spans[2:]] == [("padding", count) for count in counts]


def test_padding_has_its_own_rows_or_zeros() -> None:
    rows = (RowSpan("a", 4, 1), RowSpan("b", 2, 1))
    spans = spans_of(rows, 4, 4)
    found = indices_of(T([4, 8, 9, -1]), Handed(T([[1], [3], [3], [0]]), T([1] * 4), T([5, 3, 3, 0])), spans)
    assert found.tables.tolist() == [[1], [3], [3], [0]] and found.kv_lens.tolist() == [5, 3, 3, 0]
    spans = spans_of(rows, 4, 2)
    found = indices_of(T([4, 8, 9, -1]), Handed(T([[1], [3]]), T([1, 1]), T([5, 3])), spans)
    assert found.tables.tolist() == [[1], [3], [0]]
    assert (found.q_lens.tolist(), found.kv_lens.tolist()) == ([1, 1, 2], [5, 3, 0])


def test_a_request_without_a_row_stays_without_one() -> None:
    found = indices_of(SLOTS, Handed(T([[1, 2]]), T([3]), T([7])), SPANS)
    assert found.tables.tolist() == [[1, 2]] and found.kv_lens.tolist() == [7]


def test_a_dummy_has_one_row() -> None:
    spans = (Span("", 0, 3, 0, "dummy"),)
    found = indices_of(T([0, 1, 2]), Handed(T([[0], [0], [0]]), T([1] * 3), T([1] * 3)), spans)
    assert found.tables.tolist() == [[0]] and (found.q_lens.tolist(), found.kv_lens.tolist()) == ([3], [0])


def test_what_was_not_seen_is_empty() -> None:
    found = indices_of(None, None, SPANS)
    assert found.slots.tolist() == [] and found.tables.shape == (0, 1) and found.kv_lens.tolist() == []


def test_a_table_of_another_rank_is_handed_on() -> None:
    found = indices_of(SLOTS, Handed(T([1, 2, 3]), T([3, 2]), T([7, 2])), SPANS)
    assert found.tables.tolist() == [1, 2, 3]


def test_same_tells_what_was_handed_from_what_was_not() -> None:
    one = Handed(T([[1]]), T([1]), T([5]), T([0, 1]))
    assert one.same(Handed(T([[1]]), T([1]), T([5]), T([0, 1])))
    for other in (
        Handed(T([[2]]), T([1]), T([5]), T([0, 1])),
        Handed(T([[1]]), T([2]), T([5]), T([0, 1])),
        Handed(T([[1]]), T([1]), T([6]), T([0, 1])),
        Handed(T([[1]]), T([1]), T([5]), T([0, 2])),
        Handed(T([[1]]), T([1]), T([5])),
    ):
        assert not one.same(other) and not other.same(one)
