"""Cache slots as positions, against a search by brute force."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.probe.slots import positions_of


def brute_force(slot: int, table: list[int], block_size: int) -> int:
    for position in range(len(table) * block_size):
        if table[position // block_size] * block_size + position % block_size == slot:
            return position
    return -1


@given(st.data())
def test_every_slot_is_searched_for(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from((1, 2, 16, 128)))
    requests, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    chance = random.Random(data.draw(st.integers(0, 10**6)))
    blocks = chance.sample(range(requests * width * 2), requests * width)
    tables = [blocks[request * width : (request + 1) * width] for request in range(requests)]
    counts = [chance.randint(0, 4) for _ in range(requests)]
    layers = 2
    slots = [[chance.randrange(-2, requests * width * 2 * block_size) for _ in range(sum(counts))] for _ in range(2)]
    owners = [request for request, count in enumerate(counts) for _ in range(count)]
    expected = [
        [brute_force(slot, tables[owner], block_size) for slot, owner in zip(row, owners, strict=True)] for row in slots
    ]
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    found = positions_of(
        torch.tensor(slots, dtype=dtype).reshape(layers, sum(counts)),
        torch.tensor(tables, dtype=torch.int32),
        counts,
        block_size,
    )
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_by_hand() -> None:
    """Blocks of 4; the first request owns blocks 7 and 2, the second block 5."""
    tables = torch.tensor([[7, 2], [5, 0]])
    slots = torch.tensor([[28, 31, 8, 11, 20, 28]])
    assert positions_of(slots, tables, [4, 2], 4).tolist() == [[0, 3, 4, 7, 0, -1]], "the last is the other's block"


def test_padding_behind_a_table_and_behind_a_batch() -> None:
    """Entries behind a request's blocks are zeros, and so are rows behind the requests; block 0 itself is in use."""
    tables = torch.tensor([[0, 3, 0, 0], [0, 0, 0, 0]])
    assert positions_of(torch.tensor([[1, 6, 7]]), tables, [3], 2).tolist() == [[1, 2, 3]]


def test_no_slot_is_no_position() -> None:
    assert positions_of(torch.tensor([[-1, -5]]), torch.tensor([[0, 1]]), [2], 4).tolist() == [[-1, -1]]
    padded_with_minus_one = torch.tensor([[3, -1]])
    assert positions_of(torch.tensor([[-1, 13]]), padded_with_minus_one, [2], 4).tolist() == [[-1, 1]]


@pytest.mark.parametrize("tables", [torch.zeros(1, 3), torch.zeros(2), torch.zeros(2, 3, 1)])
def test_a_table_that_does_not_fit(tables: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="for 2 requests"):
        positions_of(torch.zeros(1, 2, dtype=torch.int64), tables, [1, 1], 4)


def test_a_table_with_a_row_per_token_is_taken_by_tokens() -> None:
    """As lmdeploy repeats it for a prefill over the paged cache: row 1 is not that of request 1."""
    tables = torch.tensor([[1, 2], [1, 2], [1, 2], [3, 0], [3, 0]])
    slots = torch.tensor([[2 * 4, 2 * 4 + 1, 2 * 4 + 2, 3 * 4, 3 * 4 + 1], [8, 9, 10, 4, 5]])
    assert positions_of(slots, tables, (3, 2), 4).tolist() == [[4, 5, 6, 0, 1], [4, 5, 6, -1, -1]]
