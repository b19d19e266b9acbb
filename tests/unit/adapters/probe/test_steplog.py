"""The step log: identity of rows, phases, what is forced, and what survives a killed worker."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import Generation, RowSpan
from adapters.probe import steplog
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, write_spec
from adapters.probe.step_reader import read_dummies, read_generations, read_steps, wait_for_ranks
from adapters.probe.steplog import StepLog

VOCABULARY = 11


def write(
    directory: Path,
    generation: int = 1,
    top_k: int = 3,
    capture: CaptureSpec | None = None,
    **requests: tuple[Any, ...],
) -> None:
    """``name=(prompt length, new tokens[, forced ids])``; the key of a request is ``k:name``."""
    named = {f"k:{name}": RequestSpec(name, *given) for name, given in requests.items()}
    write_spec(directory, ProbeSpec(generation, top_k, named, capture))


def logits(*best: int) -> torch.Tensor:
    """One row per id: that id is the greedy choice by a margin of 1, the others follow in order."""
    rows = torch.arange(VOCABULARY, 0.0, -1).repeat(len(best), 1) / 10
    for row, token in enumerate(best):
        rows[row, token] = 2.5
    return rows


def events(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"steps-rank{rank}.jsonl").read_text().splitlines()]


def test_before_there_is_a_spec_nothing_is_recorded(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0)
    log.step([("whoever", 0, 5)])
    assert log.choose(logits(1), ["whoever"]) == [None]
    assert events(tmp_path) == []


def test_rows_and_phases(tmp_path: Path) -> None:
    write(tmp_path, a=(4, 3), b=(2, 3))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 4), ("k:b", 0, 2)])
    log.step([("k:b", 2, 1), ("k:a", 4, 1)])
    log.step([("k:a", 5, 1), ("k:b", 0, 2)])
    steps = read_steps(tmp_path, 1)
    assert [step.step for step in steps] == [0, 1, 2]
    assert [step.phase for step in steps] == ["prefill", "decode", "mixed"]
    assert steps[0].rows == (RowSpan("a", 0, 4, 0), RowSpan("b", 0, 2, 0))
    assert steps[1].rows == (RowSpan("b", 2, 1, 0), RowSpan("a", 4, 1, 0)), "rows keep the order of the batch"
    assert all(step.rank == 0 and not step.dummy for step in steps)


def test_patches_are_changed_when_a_run_that_names_some_begins(tmp_path: Path) -> None:
    named = {"k:a": RequestSpec("a", 2, 2)}
    heard: list[tuple[tuple[str, ...], int]] = []
    log = StepLog(tmp_path, 0)
    log.repatch = lambda files: heard.append((tuple(files), log.generation))
    write_spec(tmp_path, ProbeSpec(1, 1, named, patches=("one.py",)))
    log.step([("k:a", 0, 2)])
    log.step([("k:a", 2, 1)])
    assert heard == [(("one.py",), 1)]
    write_spec(tmp_path, ProbeSpec(2, 1, named))
    log.step([("k:a", 0, 2)])
    assert len(heard) == 1, "a run that names none keeps what there is"
    write_spec(tmp_path, ProbeSpec(3, 1, named, patches=()))
    log.step([("k:a", 0, 2)])
    assert heard[1:] == [((), 3)]


def test_the_step_behind_the_last_token_is_known(tmp_path: Path) -> None:
    write(tmp_path, a=(4, 3))
    whole = RequestSpec("a", 4, 3)
    log = StepLog(tmp_path, 0)
    seen = []
    for start, count in ((0, 4), (4, 1), (5, 1), (6, 1)):
        log.step([("k:a", start, count)])
        seen.append((log.served(whole), log.overran(whole)))
    assert seen == [(False, False), (False, False), (True, False), (True, True)]

    write_spec(tmp_path, ProbeSpec(2, 1, {"k:a": RequestSpec("a", 4, 9, stop_ids=(2,))}))
    early = RequestSpec("a", 4, 9, stop_ids=(2,))
    log.step([("k:a", 0, 4)])
    log.choose(logits(2), ["k:a"])
    assert (log.served(early), log.overran(early)) == (True, False), "its first token ends it"
    log.step([("k:a", 4, 1)])
    assert log.overran(early)


def test_a_chunked_prefill_is_one_occurrence(tmp_path: Path) -> None:
    write(tmp_path, a=(10, 3))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 6)])
    assert log.choose(logits(1), ["k:a"]) == [None], "the prompt is not finished"
    log.step([("k:a", 6, 4)])
    assert log.choose(logits(2), ["k:a"]) == [None]
    rows = [row for step in read_steps(tmp_path, 1) for row in step.rows]
    assert rows == [RowSpan("a", 0, 6, 0), RowSpan("a", 6, 4, 0)]
    assert [step.phase for step in read_steps(tmp_path, 1)] == ["prefill", "prefill"]
    assert read_generations(tmp_path, 1, ["a"])[0].token_ids == (2,)


def test_a_preempted_request_is_computed_again(tmp_path: Path) -> None:
    write(tmp_path, a=(3, 4, (7, 8, 9, 10)))
    log = StepLog(tmp_path, 0)
    chosen = []
    for start, count in ((0, 3), (3, 1), (0, 5), (5, 1)):
        log.step([("k:a", start, count)])
        chosen.append(log.choose(logits(1), ["k:a"])[0])
    steps = read_steps(tmp_path, 1)
    assert [step.rows[0].occurrence for step in steps] == [0, 0, 1, 0]
    assert [step.phase for step in steps] == ["prefill", "decode", "prefill", "decode"]
    assert chosen == [7, 8, 9, 10], "the position decides what is forced, not the number of steps"


def test_the_first_answer_for_a_position_counts(tmp_path: Path) -> None:
    write(tmp_path, a=(3, 2))
    log = StepLog(tmp_path, 0)
    for start, count, best in ((0, 3, 4), (0, 3, 5), (3, 1, 6)):
        log.step([("k:a", start, count)])
        log.choose(logits(best), ["k:a"])
    assert read_generations(tmp_path, 1, ["a"])[0].token_ids == (4, 6)
    # An engine that drops the answer of a request which it evicts meanwhile asks again, and appends the second.
    assert read_generations(tmp_path, 1, ["a"], returned={"a": [5, 6]})[0].token_ids == (5, 6)
    assert read_generations(tmp_path, 1, ["a"], returned={"a": [9, 6]})[0].token_ids == (4, 6), "it is neither"
    assert read_generations(tmp_path, 1, ["a"], returned={"a": []})[0].token_ids == (4, 6)
    assert [step.rows[0].occurrence for step in read_steps(tmp_path, 1)] == [0, 1, 0]


def test_only_generated_positions_are_forced(tmp_path: Path) -> None:
    write(tmp_path, forced=(2, 2, (9, 8)), free=(2, 2))
    log = StepLog(tmp_path, 0)
    keys = ["k:forced", "k:free"]
    log.step([("k:forced", 0, 1), ("k:free", 0, 2)])
    assert log.choose(logits(1, 2), keys) == [None, None]
    log.step([("k:forced", 1, 1), ("k:free", 2, 1)])
    assert log.choose(logits(3, 4), keys) == [9, None]
    log.step([("k:forced", 2, 1)])
    assert log.choose(logits(5), ["k:forced"]) == [8]
    forced, free = read_generations(tmp_path, 1, ["forced", "free"])
    assert (forced.token_ids, forced.greedy_ids) == ((9, 8), (3, 5))
    assert (free.token_ids, free.greedy_ids) == ((2, 4), (2, 4))
    assert [step.forced for step in read_steps(tmp_path, 1)] == [{}, {"forced": 9}, {"forced": 8}]


def test_a_surplus_step_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, a=(2, 1, (9,)))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 2)])
    assert log.choose(logits(1), ["k:a"]) == [9]
    log.step([("k:a", 2, 1)])
    assert log.choose(logits(1), ["k:a"]) == [None]
    assert read_generations(tmp_path, 1, ["a"])[0].token_ids == (9,)


def test_a_surplus_step_of_the_run_before(tmp_path: Path) -> None:
    """An engine that looks ahead makes it when the next run's spec is there already."""
    write(tmp_path, a=(2, 1))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 2)])
    log.choose(logits(1), ["k:a"])
    write(tmp_path, 2, b=(3, 1))
    log.step([("k:a", 2, 1)])
    assert log.choose(logits(4), ["k:a"]) == [None]
    log.step([("k:b", 0, 3)])
    log.choose(logits(5), ["k:b"])
    assert [step.step for step in read_steps(tmp_path, 1)] == [0, 1]
    assert [step.step for step in read_steps(tmp_path, 2)] == [0]
    assert read_generations(tmp_path, 1, ["a"])[0].token_ids == (1,)
    assert read_generations(tmp_path, 2, ["b"])[0].token_ids == (5,)


def test_logprobs_are_the_log_softmax_of_the_raw_logits(tmp_path: Path) -> None:
    write(tmp_path, top_k=4, a=(2, 1))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 2)])
    raw = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    log.choose(raw, ["k:a"])
    step = read_generations(tmp_path, 1, ["a"])[0].steps[0]
    values = raw[0].double().tolist()
    total = math.log(sum(math.exp(value) for value in values))
    expected = sorted(((value - total, token) for token, value in enumerate(values)), reverse=True)[:4]
    assert [token for token, _ in step.top] == [token for _, token in expected]
    assert [logprob for _, logprob in step.top] == pytest.approx([value for value, _ in expected], abs=1e-5)
    assert step.greedy == expected[0][1]


def test_logits_are_not_changed(tmp_path: Path) -> None:
    write(tmp_path, a=(1, 1, (3,)))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 1)])
    raw = logits(2)
    log.choose(raw, ["k:a"])
    assert torch.equal(raw, logits(2))


def test_fewer_ids_than_asked_for(tmp_path: Path) -> None:
    write(tmp_path, top_k=20, a=(1, 1))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 1)])
    log.choose(logits(2), ["k:a"])
    assert len(read_generations(tmp_path, 1, ["a"])[0].steps[0].top) == VOCABULARY


def test_infinite_and_nan_logits_are_recorded(tmp_path: Path) -> None:
    write(tmp_path, a=(1, 1))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 1)])
    raw = torch.full((1, VOCABULARY), -math.inf)
    raw[0, 4] = math.nan
    log.choose(raw, ["k:a"])
    assert all(math.isnan(value) for _, value in read_generations(tmp_path, 1, ["a"])[0].steps[0].top)


def test_unknown_requests_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, a=(1, 1))
    log = StepLog(tmp_path, 0)
    with pytest.raises(RuntimeError, match="'k:stranger', which is not in the spec of run 1"):
        log.step([("k:a", 0, 1), ("k:stranger", 0, 1)])


def test_logits_of_other_rows_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, a=(1, 1), b=(1, 1))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 1)])
    with pytest.raises(RuntimeError, match="2 rows of logits for requests k:a"):
        log.choose(logits(1, 2), ["k:a"])
    with pytest.raises(RuntimeError, match="requests k:b, but the step computes k:a"):
        log.choose(logits(1), ["k:b"])


def test_dummy_forwards_are_no_steps(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0)
    log.dummy()
    write(tmp_path, a=(1, 2))
    log.step([("k:a", 0, 1)])
    log.dummy()
    assert log.choose(logits(1), ["k:a"]) == [None], "logits after a dummy forward belong to nobody"
    log.step([("k:a", 1, 1)])
    assert [event["event"] for event in events(tmp_path)] == ["dummy", "step", "dummy", "step"]
    assert [step.step for step in read_steps(tmp_path, 1)] == [0, 1]


def test_runs_are_told_apart_by_generation(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0)
    for generation, best in ((1, 4), (2, 5), (3, 6)):
        write(tmp_path, generation, a=(2, 1))
        log.step([("k:a", 0, 2)])
        log.choose(logits(best), ["k:a"])
    for generation, best in ((1, 4), (2, 5), (3, 6)):
        (step,) = read_steps(tmp_path, generation)
        assert (step.step, step.rows[0].occurrence) == (0, 0), "each run counts from the start"
        assert read_generations(tmp_path, generation, ["a"])[0].token_ids == (best,)
    assert read_steps(tmp_path, 4) == ()
    assert read_generations(tmp_path, 4, ["a"]) == (Generation("a", ()),)


def test_a_cut_last_line_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, a=(2, 3))
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 2)])
    log.choose(logits(3), ["k:a"])
    log.step([("k:a", 2, 1)])
    path = tmp_path / "steps-rank0.jsonl"
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_text(whole[:-cut])
        assert [step.step for step in read_steps(tmp_path, 1)] == [0]
        assert read_generations(tmp_path, 1, ["a"])[0].token_ids == (3,)


class Recorder:
    """Notes what the log tells it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, spec: CaptureSpec, run: int, step: int, phase: str, rows: list[RowSpan], last: bool) -> None:
        self.calls.append((spec, run, step, phase, tuple(rows), last))

    def reorder(self, requests: list[str]) -> None:
        self.calls.append(requests)

    def start(self, spec: CaptureSpec, run: int) -> None:
        self.calls.append(f"start {run}")

    def dummy(self, tokens: int) -> None:
        self.calls.append(f"dummy of {tokens}")

    def end(self) -> None:
        self.calls.append("end")


def recorded(directory: Path) -> tuple[StepLog, list[Any]]:
    log = StepLog(directory, 0)
    recorder: Any = Recorder()
    log.recorder = recorder
    return log, recorder.calls


def test_the_recorder_is_told_of_each_step(tmp_path: Path) -> None:
    capture = CaptureSpec(str(tmp_path / "trace"))
    write(tmp_path, a=(3, 2), b=(2, 2), capture=capture)
    log, calls = recorded(tmp_path)
    log.dummy()
    log.step([("k:a", 0, 3), ("k:b", 0, 2)])
    log.order(["k:b", "k:stranger", "k:a"])
    log.end_step()
    log.step([("k:a", 3, 1), ("k:b", 2, 1)])
    assert calls == [
        "dummy of 0",
        (capture, 1, 0, "prefill", (RowSpan("a", 0, 3), RowSpan("b", 0, 2)), False),
        ["b", "a"],
        "end",
        (capture, 1, 1, "decode", (RowSpan("a", 3, 1), RowSpan("b", 2, 1)), True),
    ]


def test_a_run_that_records_nothing_tells_no_recorder(tmp_path: Path) -> None:
    write(tmp_path, a=(3, 2))
    log, calls = recorded(tmp_path)
    log.step([("k:a", 0, 3)])
    assert calls == []


def test_the_last_step_is_that_of_the_slowest_request(tmp_path: Path) -> None:
    write(tmp_path, a=(4, 1), b=(2, 3), capture=CaptureSpec(str(tmp_path)))
    log, calls = recorded(tmp_path)
    # a's prompt in two pieces; b is computed again after its second token
    for rows in ([("k:a", 0, 2)], [("k:b", 0, 2)], [("k:a", 2, 2)], [("k:b", 2, 1)], [("k:b", 0, 3)], [("k:b", 3, 1)]):
        log.step(rows)
    assert [call[-1] for call in calls] == [False] * 5 + [True]


def test_what_is_known_of_the_running_step(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0)
    assert (log.generation, log.in_step) == (0, False)
    write(tmp_path, 4, a=(3, 2))
    log.step([("k:a", 0, 3)])
    assert (log.generation, log.in_step) == (4, True)
    log.dummy()
    assert (log.generation, log.in_step) == (4, False)


def test_remarks_are_no_steps(tmp_path: Path) -> None:
    write(tmp_path, a=(3, 2))
    log = StepLog(tmp_path, 0)
    log.note("before")
    log.step([("k:a", 0, 3)])
    log.note("inside\nthe step")
    assert [event.get("text") for event in events(tmp_path)] == ["before", None, "inside\nthe step"]
    assert len(read_steps(tmp_path, 1)) == 1
    assert read_generations(tmp_path, 1, ["a"]) == (Generation("a", ()),)


def test_every_line_is_there_at_once(tmp_path: Path) -> None:
    """What is known when a worker is killed: nothing waits in a buffer."""
    write(tmp_path, a=(2, 3))
    log = StepLog(tmp_path, 0)
    for count in range(1, 4):
        log.step([("k:a", 0, 2)])
        assert len(events(tmp_path)) == count


def test_ranks_have_files_of_their_own_and_come_in_order(tmp_path: Path) -> None:
    write(tmp_path, a=(2, 1))
    for rank in (10, 2, 0):
        StepLog(tmp_path, rank).step([("k:a", 0, 2)])
    assert [step.rank for step in read_steps(tmp_path, 1)] == [0, 2, 10]


def test_one_log_per_process_made_by_whoever_knows_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "_log", None)
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    assert steplog.process_log() is None
    made = steplog.process_log(1)
    assert made is not None
    assert made.rank == 1
    assert steplog.process_log() is made
    assert steplog.process_log(5) is made


def lines(directory: Path, rank: int, *found: tuple[str, int]) -> None:
    text = "".join(json.dumps({"event": event, "generation": generation}) + "\n" for event, generation in found)
    with (directory / f"steps-rank{rank}.jsonl").open("a") as file:
        file.write(text)


def test_a_run_has_ended_when_every_rank_has(tmp_path: Path) -> None:
    lines(tmp_path, 0, ("step", 1), ("end", 1), ("step", 2), ("end", 2), ("step", 2), ("end", 2))
    lines(tmp_path, 1, ("step", 1), ("end", 1), ("step", 2), ("end", 2))
    assert wait_for_ranks(tmp_path, 1, 0.0)
    assert not wait_for_ranks(tmp_path, 2, 0.02), "the second rank has not begun its second step"
    lines(tmp_path, 1, ("step", 2))
    assert not wait_for_ranks(tmp_path, 2, 0.02), "nor ended it"
    late = threading.Timer(0.1, lines, (tmp_path, 1, ("end", 2)))
    late.start()
    assert wait_for_ranks(tmp_path, 2, 10.0)
    late.join()


def test_logs_that_know_no_end_are_not_waited_for(tmp_path: Path) -> None:
    assert wait_for_ranks(tmp_path, 1, 0.0)
    lines(tmp_path, 0, ("step", 1))
    assert wait_for_ranks(tmp_path, 1, 0.0)


# -------------------------------------------------------------------------------------------------------- groups


def two_groups(directory: Path, generation: int = 1, capture: CaptureSpec | None = None) -> None:
    """Request a is of group 0, b of group 1 and ends at token 4."""
    requests = {"k:a": RequestSpec("a", 3, 2), "k:b": RequestSpec("b", 2, 9, dp_rank=1, stop_ids=(4,))}
    write_spec(directory, ProbeSpec(generation, 1, requests, capture))


def test_the_last_step_of_a_group_is_that_of_its_own_requests(tmp_path: Path) -> None:
    two_groups(tmp_path, capture=CaptureSpec(str(tmp_path)))
    log, calls = recorded(tmp_path)
    log.step([("k:a", 0, 3)])
    log.step([("k:a", 3, 1)])
    assert [call[-1] for call in calls] == [False, True]


def test_a_request_is_served_when_it_has_its_tokens_or_ended_early(tmp_path: Path) -> None:
    two_groups(tmp_path)
    log = StepLog(tmp_path, 1, dp_rank=1)
    assert log.enter_announced() == 1
    spec = log.spec
    assert spec is not None
    a, b = spec.requests["k:a"], spec.requests["k:b"]
    log.step([("k:b", 0, 2)])
    assert not log.served(b)
    log.choose(torch.eye(6)[[4]], ["k:b"])
    assert log.served(b) and not log.served(a)
    log.step([("k:a", 0, 3)])
    assert not log.served(a)
    log.step([("k:a", 3, 1)])
    assert log.served(a), "the step that runs computes its last token"


def test_idle_forwards_are_of_the_run_that_was_announced(tmp_path: Path) -> None:
    two_groups(tmp_path, capture=CaptureSpec(str(tmp_path)))
    log, calls = recorded(tmp_path)
    assert log.enter_announced() == 1
    log.dummy(1, idle=True, cycle=0, mode="prefill")
    log.step([("k:a", 0, 3)], cycle=1, mode="decode")
    log.dummy(16)
    assert calls[:2] == ["start 1", "dummy of 1"], "a rank without requests leaves a trace of that"
    (idle,) = read_dummies(tmp_path, 1)
    assert (idle.step, idle.tokens, idle.cycle, idle.mode, idle.dummy) == (-1, 1, 0, "prefill", True)
    (step,) = read_steps(tmp_path, 1)
    assert (step.cycle, step.mode) == (1, "decode")
    assert read_dummies(tmp_path, 2) == ()


def test_the_surplus_step_of_a_run_may_come_when_the_next_was_announced(tmp_path: Path) -> None:
    two_groups(tmp_path)
    log = StepLog(tmp_path, 0)
    log.step([("k:a", 0, 3)])
    write_spec(tmp_path, ProbeSpec(2, 1, {"n:a": RequestSpec("a", 3, 2)}, CaptureSpec(str(tmp_path))))
    assert log.enter_announced() == 2
    recorder: Any = Recorder()
    log.recorder = recorder
    log.step([("k:a", 3, 1)])
    log.end_step()
    assert recorder.calls == ["end"], "a trace that is closed is not opened again"
    log.step([("n:a", 0, 3)])
    assert [(step.step, step.rows[0].start) for step in read_steps(tmp_path, 1)] == [(0, 0), (1, 3)]
    assert [(step.step, step.rows[0].occurrence) for step in read_steps(tmp_path, 2)] == [(0, 0)]


def test_only_the_ranks_of_a_group_are_waited_for(tmp_path: Path) -> None:
    two_groups(tmp_path)
    first, second = StepLog(tmp_path, 0), StepLog(tmp_path, 1, dp_rank=1)
    first.step([("k:a", 0, 3)])
    first.end_step()
    second.step([("k:b", 0, 2)])
    assert wait_for_ranks(tmp_path, 1, 0.0, ranks=range(1)) is True
    assert wait_for_ranks(tmp_path, 1, 0.0) is False
    assert [step.rank for step in read_steps(tmp_path, 1, range(1, 2))] == [1]
