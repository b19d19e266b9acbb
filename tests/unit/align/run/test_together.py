"""What data-parallel groups did while others worked, read from steps and traces."""

from __future__ import annotations

import json
from pathlib import Path

from adapters.base import RowSpan, RunResult, StepRecord
from align.run.together import idle_remarks, together, torn_remarks
from align.trace.format import RANK_FILE, STEPS_FILE, StepEntry
from align.trace.reader import Trace


def step(number: int, phase: str, rank: int, cycle: int | None, mode: str) -> StepRecord:
    return StepRecord(number, phase, (RowSpan(f"r{rank}", 0, 1),), {}, rank, cycle=cycle, mode=mode)


def dummy(rank: int, cycle: int, mode: str, tokens: int = 1) -> StepRecord:
    return StepRecord(-1, "", (), {}, rank, True, tokens, cycle, mode)


def test_dummies_are_counted_with_their_lengths_and_phases_that_differ_are_information() -> None:
    result = RunResult(
        (),
        (
            step(0, "prefill", 0, 0, "prefill"),
            step(1, "decode", 0, 1, "prefill"),
            step(2, "decode", 0, 2, "decode"),
            step(0, "prefill", 1, 1, "prefill"),
        ),
        1.0,
        dummies=(dummy(1, 0, "prefill"), dummy(1, 2, "decode", 2)),
    )
    found = together(result)
    assert found is not None
    assert (found.cycles, found.dummies, found.lengths) == (3, {"rank 1": 2}, (1, 2))
    assert (found.split, found.torn) == ((1,), ())
    assert torn_remarks({"candidate": result, "reference": None}) == ()
    json.dumps(found.to_dict())


def test_ranks_that_run_one_forward_in_two_modes_are_told() -> None:
    result = RunResult((), (step(1, "decode", 0, 4, "decode"),), 1.0, dummies=(dummy(1, 4, "prefill"),))
    (remark,) = torn_remarks({"candidate": result})
    assert "candidate" in remark and "common forward 4" in remark


def test_engines_whose_groups_do_not_step_together_have_nothing_in_common() -> None:
    result = RunResult((), (step(0, "prefill", 0, None, ""),), 1.0)
    assert together(result) is None
    assert torn_remarks({"reference": result}) == ()


def trace(directory: Path, dummies: dict[int, list[int]], served: tuple[int, ...], dp: int = 2) -> Trace:
    """A trace with ranks that made these dummies; requests are for these groups."""
    directory.mkdir()
    requests = [{"name": f"r{group}", "prompt_len": 1, "dp_rank": group} for group in served]
    layout = {"tp": 1, "dp": dp, "ep": 1}
    manifest = {"schema": 2, "dtype": "bfloat16", "model": {}, "layout": layout, "requests": requests}
    (directory / "trace.json").write_text(json.dumps(manifest))
    for rank, lengths in dummies.items():
        folder = directory / f"rank{rank}"
        folder.mkdir()
        (folder / RANK_FILE).write_text(json.dumps({"rank": rank, "dp_rank": rank, "shards": {}}))
        lines = [StepEntry(-1, "", dummy=True, tokens=length).to_dict() for length in lengths]
        (folder / STEPS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace(directory)


def test_an_idle_group_is_named_with_what_kept_it_in_step(tmp_path: Path) -> None:
    traces = {
        "candidate": trace(tmp_path / "a", {0: [], 1: [1, 1, 1]}, (0,)),
        "reference": trace(tmp_path / "b", {0: []}, (0,)),
    }
    assert all(one.idle_groups == (1,) and one.absent_ranks == () for one in traces.values())
    mine, theirs = idle_remarks(traces)
    assert mine.startswith("data-parallel rank 1 of the candidate had no request and was idle")
    assert "3 dummy forwards of 1 token," in mine
    assert "data-parallel rank 1 of the reference" in theirs and "made no forward" in theirs


def test_groups_with_requests_are_not_idle_and_their_ranks_must_be_there(tmp_path: Path) -> None:
    both = trace(tmp_path / "a", {0: []}, (0, 1))
    assert (both.idle_groups, both.absent_ranks) == ((), (1,))
    assert idle_remarks({"candidate": both}) == ()
