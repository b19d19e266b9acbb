"""What a run leaves as JSON: complete, plain, and the same for the same run apart from times."""

from __future__ import annotations

import json
from typing import Any

from adapters.base import EngineSpec, Observation, RowSpan, RunResult, StepRecord
from adapters.probe.spec import CaptureSpec
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.findings import Finding
from align.run.outcome import Outcome, SideOutcome
from align.run.record import run_record, tokens_record
from align.run.report import Report
from align.run.stability import Stability
from tests.unit.align.run import fakes


def outcome(seconds: float = 1.0, replay: bool = True) -> Outcome:
    steps = (StepRecord(0, "prefill", (RowSpan("r0", 0, 3),), {"r0": 4}),)
    run = RunResult((fakes.generation("r0", 4, 5),), steps, seconds)
    side = SideOutcome(
        engine="lmdeploy",
        spec=EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w", options={"sampling.top_k": 5}),
        launched=fakes.launched(7, (8,)),
        observations=[Observation("tp", 1, "config")],
        free=run,
        replay=run if replay else None,
        captures=[CaptureSpec("/t")],
    )
    return Outcome({"candidate": side, "reference": SideOutcome("vllm")})


def record(seconds: float = 1.0) -> dict[str, Any]:
    free = outcome().sides["candidate"].free
    assert free is not None
    comparison = compare_tokens(
        free.generations, free.generations, mode="free", policy=NoisePolicy.for_dtype("bfloat16")
    )
    report = Report(verdict="aligned", comparisons={"free": comparison})
    report.findings = (Finding("B", "weights", checkpoint="layers.0.mlp.up"),)
    report.stability = (Stability("candidate", 2, None, 0.0),)
    report.seconds = {"launch": seconds}
    return run_record(fakes.case(), fakes.info(), outcome(seconds), report, ["align", "run", "--model", "x"])


def test_a_run_is_plain_json() -> None:
    written = record()
    assert json.loads(json.dumps(written, allow_nan=False)) == json.loads(json.dumps(written))
    assert written["verdict"] == "aligned"
    assert written["command"] == ["align", "run", "--model", "x"]
    assert written["model"] == {"name": "tiny", "path": "/models/tiny", "fingerprint": "0123456789abcdef"}
    assert written["case"] == fakes.case().model_dump(mode="json")
    assert written["sides"]["candidate"]["launched"]["simulated"] is True
    assert written["sides"]["candidate"]["observed"][0]["value"] == 1
    assert written["comparisons"]["free"]["verdict"] == "aligned"
    assert written["sides"]["candidate"]["spec"]["options"] == {"sampling.top_k": 5}
    assert written["sides"]["candidate"]["captures"][0]["directory"] == "/t"
    assert written["findings"][0]["summary"].startswith("Path B")
    assert written["stability"][0]["stable"] is True
    assert (written["conditions"], written["tensors"], written["reason"]) == ([], None, "")


def test_a_side_that_did_not_get_far() -> None:
    assert record()["sides"]["reference"] == {
        "engine": "vllm", "spec": None, "launched": None, "observed": [], "captures": [], "seconds": {},
        "together": {},
    }  # fmt: skip


def test_only_times_change() -> None:
    first, second = record(1.0), record(9.0)
    for written in (first, second):
        assert set(written["sides"]["candidate"].pop("seconds")) == {"free", "replay"}
        assert set(written.pop("seconds")) == {"launch"}
    assert first == second


def test_tokens_of_both_runs_by_side() -> None:
    written = json.loads(json.dumps(tokens_record(outcome())))
    assert set(written) == {"free", "replay"}
    assert set(written["free"]) == {"candidate"}, "the reference has no tokens"
    (generation,) = written["free"]["candidate"]["generations"]
    assert [step["chosen"] for step in generation["steps"]] == [4, 5]
    assert generation["steps"][0]["top"] == [[4, -0.1], [5, -2.0]]
    (step,) = written["free"]["candidate"]["steps"]
    assert step["rows"] == [{"request": "r0", "start": 0, "count": 3, "occurrence": 0}]
    assert step["forced"] == {"r0": 4}
    assert set(tokens_record(outcome(replay=False))) == {"free"}
