"""Collectives of both real engines over two ranks: all are recorded, and ranks that part end the run with a finding."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from align.collectives.record.files import FOLDER, Records, read_records
from align.collectives.record.mismatch import differences, read_mismatch
from align.collectives.record.types import CollectiveCall
from tests.integration.collective_faults import LAYER, STEP, patch
from tests.integration.support import align_command, align_environment, alive, processes_below, wait_until_gone
from tests.integration.test_tensors import run

LAYERS = 4
#: What each engine's code calls in one forward of a dense model at TP2: lmdeploy 0.12.2 holds the embedding and the
#: head whole on every rank; vLLM 0.23.0 splits both by the vocabulary.
EXPECTED = {
    "candidate": Counter({"attn.o": LAYERS, "mlp.down": LAYERS}),
    "reference": Counter({"attn.o": LAYERS, "mlp.down": LAYERS, "embed": 1, "logits": 1}),
}
Key = tuple[str, int]


def kind(call: CollectiveCall) -> str:
    return call.where.split(".", 2)[2] if call.where.startswith("layers.") else call.where


@pytest.mark.timeout(600)
def test_every_collective_of_a_clean_run_is_recorded_on_both_ranks(tmp_path: Path) -> None:
    record = run(tmp_path / "out", "--tp", "2", code=0, timeout=550.0)
    assert record["findings"] == []
    for side in SIDES:
        all_is_recorded(tmp_path / "out" / side, side)


def all_is_recorded(directory: Path, side: str) -> None:
    """Of a side's directory after a clean run."""
    records = read_records(directory / "trace" / FOLDER)
    assert records is not None
    assert (records.ranks, records.notes) == ((0, 1), ())
    assert read_mismatch(directory / FOLDER) is None
    first, second = ([call for call in records.calls if call.rank == rank] for rank in (0, 1))
    assert len(first) == len(second) > 100
    others: Mapping[Key, CollectiveCall] = {(one.group_name, one.in_group): one for one in second}
    for one in first:
        assert differences(one, others[one.group_name, one.in_group]) == ()
    assert all(one.ended and not one.error for one in records.calls)
    inside = [one for one in first if one.place.generation == _recorded(records) and one.place.inside]
    forwards = Counter(one.place.step for one in inside)
    assert len(forwards) > 5
    for step in forwards:
        assert Counter(kind(one) for one in inside if one.place.step == step) == EXPECTED[side], (side, step)
    assert all(one.values and one.checksum_in and one.checksum_out for one in inside), side
    _are_the_sum([one for one in inside if one.operation == "all_reduce"], others)


def _recorded(records: Records) -> int:
    """Number of the run whose tensors are in the trace."""
    (found,) = [number for number, name in records.recordings.items() if name == "trace"]
    return found


def _are_the_sum(calls: Sequence[CollectiveCall], others: Mapping[Key, CollectiveCall]) -> None:
    for one in calls[:20]:
        other = others[one.group_name, one.in_group]
        total = one.tensors["in.0"].float() + other.tensors["in.0"].float()
        assert torch.equal(one.tensors["out.0"], total.to(one.tensors["out.0"].dtype)), one.where
        assert one.checksum_out == other.checksum_out


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("side", "fault"), [("candidate", "skip"), ("reference", "skip"), ("candidate", "more")])
def test_ranks_that_part_are_told_before_anybody_waits(side: str, fault: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = patch(fault, tmp_path)
    record = run(out, "--tp", "2", "--no-ladder", "--patch", f"{side}={file}", code=1, timeout=550.0)
    both_calls_are_told(record, out, side, fault)


def both_calls_are_told(record: Mapping[str, Any], out: Path, side: str, fault: str) -> None:
    """In the record of a run and in its report."""
    finding = record["findings"][0]
    where = f"layers.{LAYER}.attn.o"
    assert (finding["path"], finding["kind"], finding["side"]) == ("C", "order", side)
    assert (finding["checkpoint"], finding["step"], finding["ranks"]) == (where, STEP, [0, 1])
    calls = finding["evidence"]["next_calls"]
    assert [(one["rank"], one["checkpoint"]) for one in calls] == [(0, where), (1, f"layers.{LAYER}.mlp.down")]
    # A call that is left out, or one that is made twice, by what both made before.
    agreed = finding["evidence"]["agreed"]["checkpoint"]
    assert agreed == (where if fault == "more" else f"layers.{LAYER - 1}.mlp.down")
    report = (out / "report.md").read_text()
    for one in calls:
        assert any("linear" in frame for frame in one["site"]), one
        assert one["site"][0].partition(" ")[0] in report


@pytest.mark.timeout(600)
def test_nothing_is_left_running(tmp_path: Path) -> None:
    """lmdeploy waits for ever for a worker that raised; the run ends all the same."""
    file = patch("skip", tmp_path)
    command = align_command(
        "run", "--tp", "2", "--patch", f"candidate={file}", "--out", str(tmp_path / "out"), "--quiet"
    )
    started = time.monotonic()
    with subprocess.Popen(command, env=align_environment(), stdout=subprocess.PIPE, text=True) as done:
        below: set[int] = set()
        while done.poll() is None:
            below |= set(processes_below(done.pid)) if alive([done.pid]) else set()
            time.sleep(0.5)
        assert done.stdout is not None
        told = done.stdout.read()
    assert done.returncode == 1
    assert "order of the candidate" in told
    assert time.monotonic() - started < 500, "a collective that nobody answers waits for half an hour"
    assert len(below) > 4
    assert wait_until_gone(sorted(below), 10.0) == {}
