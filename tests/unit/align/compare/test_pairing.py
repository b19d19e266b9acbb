"""Rows of two traces find each other whatever the batches looked like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.compare.pairing import ONLY, PARTED, Pairing, RowKey, pair_rows
from align.trace.format import POSITIONS, TOKEN_IDS
from align.trace.reader import Trace
from tests.unit.align.compare import traces


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return traces.write(tmp_path_factory.mktemp("reference"))


def keys(pairing: Pairing) -> list[RowKey]:
    return [row.key for row in pairing.rows]


def test_batch_order_and_step_boundaries_do_not_matter(tmp_path: Path, reference: Trace) -> None:
    steps = (
        ("prefill", (RowSpan("r1", 0, 2),)),
        ("mixed", (RowSpan("r1", 2, 1), RowSpan("r0", 0, 3))),
        ("decode", (RowSpan("r0", 3, 1),)),
    )
    found = pair_rows(traces.write(tmp_path, steps=steps), reference)
    expected = [("r0", 0), ("r0", 1), ("r0", 2), ("r0", 3), ("r1", 0), ("r1", 1), ("r1", 2)]
    assert keys(found) == [(request, position, 0) for request, position in expected]
    assert not found.unpaired and not found.parted and not found.inputs and not found.notes
    row = found.rows[2]  # r0 position 2 reaches the head on both sides
    assert (row.phase, row.candidate.step, row.candidate.index, row.candidate.head) == ("mixed", 1, 3, 1)
    assert (row.reference.step, row.reference.index, row.reference.head) == (0, 2, 0)
    assert found.rows[0].candidate.head is None


def test_the_order_of_requests_is_the_manifests(tmp_path: Path, reference: Trace) -> None:
    about = {"requests": [{"name": "r1"}, {"name": "r0"}], "generations": {}}
    found = pair_rows(reference, traces.write(tmp_path, about=about))
    assert [key[0] for key in keys(found)] == ["r1"] * 3 + ["r0"] * 4


def test_occurrences_are_rows_of_their_own(tmp_path: Path, reference: Trace) -> None:
    steps = (*traces.STEPS, ("prefill", (RowSpan("r0", 0, 3, 1),)))
    found = pair_rows(traces.write(tmp_path, steps=steps), reference)
    assert len(found.rows) == 7 and found.unpaired == {ONLY["candidate"]: 3}


def test_what_one_side_never_ran_is_counted(tmp_path: Path, reference: Trace) -> None:
    found = pair_rows(reference, traces.write(tmp_path, steps=traces.STEPS[:1]))
    assert len(found.rows) == 5 and found.unpaired == {ONLY["candidate"]: 2}


def test_rows_behind_a_parting_are_not_compared(tmp_path: Path, reference: Trace) -> None:
    """A free run that chose another second token feeds it back: a consequence, not a wrong input."""

    def feed(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if phase == "decode":
            tensors[TOKEN_IDS][1] = 31  # r0 position 3

    run = [
        {"request": "r0", "steps": [{"chosen": 31}, {"chosen": 2}]},
        {"request": "r1", "steps": [{"chosen": 3}, {"chosen": 4}]},
    ]
    found = pair_rows(traces.write(tmp_path, edit=feed, about={"generations": {"free": run}}), reference)
    assert found.parted == {"r0": 3}
    assert found.unpaired == {PARTED: 1}
    assert ("r0", 3, 0) not in keys(found) and len(found.rows) == 6
    assert not found.inputs


def test_a_side_that_was_fed_something_else_is_named(tmp_path: Path, reference: Trace) -> None:
    def feed(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if phase == "prefill":
            tensors[TOKEN_IDS][4] = 31  # r1 position 1
            tensors[POSITIONS][1:3] += 1  # r0 positions 1 and 2

    found = pair_rows(reference, traces.write(tmp_path, edit=feed))
    described = [(one.key, one.request, one.position, one.candidate, one.reference, one.side) for one in found.inputs]
    assert described == [
        (TOKEN_IDS, "r1", 1, 9, 31, "reference"),
        (POSITIONS, "r0", 1, 1, 2, "reference"),
        (POSITIONS, "r0", 2, 2, 3, "reference"),
    ]
    assert found.parted == {"r1": 1}


def test_unrecorded_inputs_are_said_and_taken_from_what_was_asked_for(tmp_path: Path, reference: Trace) -> None:
    def forget(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors[TOKEN_IDS], tensors[POSITIONS]

    other = [{"name": "r0", "token_ids": [5, 30, 7]}, {"name": "r1", "token_ids": [8, 9]}]
    found = pair_rows(traces.write(tmp_path, edit=forget, about={"requests": other}), reference)
    assert any("token_ids" in note for note in found.notes) and any("positions" in note for note in found.notes)
    assert found.parted == {"r0": 1}
    assert [(one.request, one.position, one.side) for one in found.inputs] == [("r0", 1, None)]


def test_dummy_steps_take_no_part(reference: Trace) -> None:
    assert any(entry.dummy for entry in reference.steps())
    assert len(pair_rows(reference, reference).rows) == 7
