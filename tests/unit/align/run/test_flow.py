"""The order of a joint run, what stops it, and that its traces say the same as the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES, Generation, Observation, TokenStep
from align.conditions import Condition
from align.errors import SideError, UserError
from align.run import certify, offline
from align.run.flow import Flow, Wishes
from align.run.offline import Offline
from align.run.plan import SideExtras
from align.run.record import report_record, run_record
from align.sentences import text_of
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted

WHOLE = ["launch", "generate", "observe", "again", "record", "closed"]
CLOSER = [*WHOLE[:-1], "record alone", "closed"]
Judge = Callable[..., tuple[Condition, ...]]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A run whose conditions hold."""
    conditions(monkeypatch, lambda **_: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    return Scripted(tmp_path)


def conditions(monkeypatch: pytest.MonkeyPatch, judge: Judge) -> None:
    def evaluate(case: Any, info: Any, structure: Any, sides: Any, **rest: Any) -> tuple[Condition, ...]:
        return judge(sides=sides, **rest)

    monkeypatch.setattr(certify, "evaluate", evaluate)
    monkeypatch.setattr(offline, "evaluate", evaluate)


def flow(session: Any, **wishes: Any) -> Flow:
    return Flow(session, recordings.case(), recordings.info(), Wishes(**wishes))


def compare(session: Scripted, **given: Any) -> dict[str, Any]:
    """What the traces of a run say by themselves."""
    compared = Offline(given.pop("allow", ()), given.pop("policy", "derived"), given.pop("min_coverage", 100.0))
    return report_record(compared.run(session.directories).report)


def twice_up(phase: str, step: int, tensors: dict[str, Any]) -> None:
    tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2


# ------------------------------------------------------------------------------------------------------- verdicts


def test_a_clean_run(session: Scripted) -> None:
    report = flow(session).run()
    assert (report.verdict, report.reason, report.findings) == ("aligned", "", ())
    assert session.stages == WHOLE
    assert [one.noise for one in report.stability] == [0.0, 0.0]
    assert set(report.comparisons) == {"free", "replay"}
    assert report.tensors is not None
    assert all(one.verdict == "equal" for one in report.tensors.checkpoints)
    assert {side: coverage.percent for side, coverage in report.tensors.coverage.items()} == {
        "candidate": 100.0,
        "reference": 100.0,
        "paired": 100.0,
    }
    assert all(count > 0 for count in report.bytes.values())
    assert any(said.startswith("compare ") and "layers.1.mlp.up" in said for said in session.said)
    assert set(report.seconds) >= {"launch", "generate", "generate again", "record", "compare"}


def test_a_wrong_tensor_is_a_finding_although_the_tokens_agree(session: Scripted) -> None:
    session.edits["candidate"] = twice_up
    report = flow(session).run()
    assert report.verdict == "diverged"
    assert report.findings[0].checkpoint == "layers.1.mlp.up"
    assert session.stages == CLOSER, "everything was kept already"


def test_a_weight_that_differs_from_the_checkpoint(session: Scripted) -> None:
    session.weights["reference"] = [
        {
            "parameter": "model.layers.1.mlp.up_proj.weight", "status": "differs", "kind": "mlp.up", "layer": 1,
            "live": "", "rank": 0, "rows": [3], "rows_total": 1, "max_abs": 0.5, "why": "",
        }
    ]  # fmt: skip
    (finding,) = flow(session).run().findings
    assert (finding.kind, finding.side, finding.checkpoint) == ("weights", "reference", "layers.1.mlp.up")


def test_tokens_that_differ_without_a_tensor_are_not_located(session: Scripted) -> None:
    session.runs["candidate"] = dict.fromkeys(("free", "again"), recordings.generations({"r0": (1, 9), "r1": (3, 4)}))
    report = flow(session).run()
    assert report.verdict == "diverged"
    assert [finding.path for finding in report.findings] == ["UNLOCATED"]


@pytest.mark.parametrize("fault", [None, twice_up])
@pytest.mark.parametrize("budget", [0, 10**9])
def test_the_traces_say_what_the_run_said(session: Scripted, fault: Any, budget: int) -> None:
    if fault is not None:
        session.edits["candidate"] = fault
    # A scripted side leaves no digests of what the budget does not hold.
    demanded = 100.0 if budget else 50.0
    report = flow(session, budget=budget, min_coverage=demanded).run()
    said = report_record(report)
    assert said["min_coverage"] == demanded
    assert json.loads(json.dumps(compare(session, min_coverage=demanded))) == json.loads(json.dumps(said))


def test_the_policy_of_the_seeds(session: Scripted) -> None:
    def little(phase: str, step: int, tensors: dict[str, Any]) -> None:
        tensors["layers.0.attn.v"] = tensors["layers.0.attn.v"] * 1.01

    session.edits["candidate"] = little
    assert flow(session).run().verdict == "aligned", "1 % is within what rounding allows"
    assert compare(session, policy="seed")["verdict"] == "diverged", "1e-2 is above the seeds' 1e-3"


# ------------------------------------------------------------------------------------------------------ coverage


def without_q_rope(phase: str, step: int, tensors: dict[str, Any]) -> None:
    del tensors["layers.0.attn.q_rope"]


def test_nothing_found_in_too_little_is_not_comparable(session: Scripted) -> None:
    session.edits["reference"] = without_q_rope
    run = flow(session)
    with pytest.raises(UserError) as caught:
        run.run()
    assert "candidate 100 % of 40, reference 97.5 % of 40, paired 97.5 % of 40" in caught.value.message
    assert "layers.0.attn.q_rope (not recorded by the reference)" in caught.value.message
    assert "on the reference" in caught.value.hint
    assert caught.value.hint.endswith("--min-coverage 97.5")
    assert run.report.verdict == "not comparable"
    assert run.report.reason == caught.value.message
    assert run.report.tensors is not None, "what was found out is kept"
    record = report_record(run.report)
    assert (record["min_coverage"], record["tensors"]["coverage"]["paired"]["percent"]) == (100.0, 97.5)


@pytest.mark.parametrize(("demanded", "verdict"), [(97.5, "aligned"), (0.0, "aligned"), (97.6, None)])
def test_less_coverage_can_be_accepted(session: Scripted, demanded: float, verdict: str | None) -> None:
    session.edits["reference"] = without_q_rope
    run = flow(session, min_coverage=demanded)
    if verdict is None:
        with pytest.raises(UserError, match=r"below the demanded 97\.6 %"):
            run.run()
    else:
        assert run.run().verdict == verdict


def test_what_is_wrong_stays_wrong_whatever_the_coverage(session: Scripted) -> None:
    def fault(phase: str, step: int, tensors: dict[str, Any]) -> None:
        twice_up(phase, step, tensors)
        without_q_rope(phase, step, tensors)

    session.edits["candidate"] = fault
    report = flow(session).run()
    assert report.verdict == "diverged"
    assert report.tensors is not None
    assert report.tensors.coverage["paired"].percent == 97.5


def test_tokens_alone_demand_no_coverage(session: Scripted) -> None:
    report = flow(session, tensors=False).run()
    assert (report.verdict, report.min_coverage) == ("aligned", None)


# ----------------------------------------------------------------------------------------------------- recording


def test_what_the_user_asks_for_is_what_is_kept(session: Scripted) -> None:
    session.edits["reference"] = twice_up
    report = flow(session, budget=0, values=("layers.1.mlp.*",)).run()
    assert session.stages == CLOSER
    assert report.findings[0].checkpoint == "layers.1.mlp.up"
    assert report.tensors is not None
    assert {one.name for one in report.tensors.checkpoints if one.compared} == {
        f"layers.1.mlp.{part}" for part in ("gate", "up", "act", "down")
    }
    for side in session.outcome.sides.values():
        assert side.captures[-1].values == ("layers.1.mlp.*",)


def test_nothing_to_compare_is_not_comparable(session: Scripted) -> None:
    run = flow(session, values=("nothing.of.the.kind",))
    with pytest.raises(UserError, match="no tensor is on both sides"):
        run.run()
    assert run.report.verdict == "not comparable"


def test_what_is_wrong_is_tried_with_one_request_alone(session: Scripted) -> None:
    session.edits["candidate"] = twice_up
    report = flow(session).run()
    assert session.stages == ["launch", "generate", "observe", "again", "record", "record alone", "closed"]
    assert report.alone is not None
    alone = report.alone
    assert (alone.request, alone.checkpoint, alone.reproduced) == ("r0", "layers.1.mlp.up", True)
    assert alone.found is not None and "layers.1.mlp.up" in alone.found
    content = json.loads((session.directories["candidate"] / "closer" / "trace.json").read_text())
    assert [one["name"] for one in content["requests"]] == ["r0"]
    assert content["capture"]["values"] == list(alone.values)
    whole = json.loads((session.directories["candidate"] / "trace" / "trace.json").read_text())
    assert [one["name"] for one in whole["requests"]] == ["r0", "r1"], "the first recording stays as it was"


def test_what_only_a_batch_shows_is_recorded_again_with_its_values(
    session: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.edits["candidate"] = twice_up
    session.batch_only = True
    # As if digests had shown what is wrong: a scripted side leaves none.
    report = flow(session, values=("layers.1.mlp.up", "layers.1.mlp_norm"), min_coverage=0.0).run()
    stages = ["launch", "generate", "observe", "again", "record", "record alone", "record", "closed"]
    assert session.stages == stages
    assert report.alone is not None and not report.alone.reproduced
    content = json.loads((session.directories["candidate"] / "trace" / "trace.json").read_text())
    assert content["look"] == 2
    assert "layers.1.*" in content["capture"]["values"]
    assert "layers.1.mlp.up" in content["capture"]["values"], "what was kept before is kept again"


def test_what_only_a_batch_shows_is_not_recorded_again_if_its_values_are_there(session: Scripted) -> None:
    session.edits["candidate"] = twice_up
    session.batch_only = True
    report = flow(session).run()
    assert session.stages[-2:] == ["record alone", "closed"]
    assert report.alone is not None and not report.alone.reproduced and report.alone.found is None


def test_tokens_alone(session: Scripted) -> None:
    report = flow(session, tensors=False).run()
    assert session.stages == ["launch", "generate", "observe", "again", "closed"]
    assert (report.verdict, report.tensors) == ("aligned", None)
    assert not (session.directories["candidate"] / "trace").exists()
    session.stages.clear()
    assert flow(session, tensors=False, replay="always").run().comparisons.keys() == {"free", "replay"}
    assert "replay" in session.stages


def test_models_without_a_table_of_checkpoints(session: Scripted) -> None:
    info = replace(recordings.info(), config={"architectures": ["MambaForCausalLM"]})
    with pytest.raises(UserError, match="no checkpoints are defined for MambaForCausalLM") as caught:
        Flow(session, recordings.case(), info, Wishes())  # type: ignore[arg-type]
    assert "--no-tensors" in caught.value.hint
    report = Flow(session, recordings.case(), info, Wishes(tensors=False)).run()  # type: ignore[arg-type]
    assert report.conditions == ()


# ----------------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize("verdict", ["false", "unknown"])
@pytest.mark.parametrize(("stage", "stages"), [("launch", WHOLE[:1]), ("run", WHOLE[:3])])
def test_a_condition_stops_the_run_as_early_as_it_is_known(
    session: Scripted, monkeypatch: pytest.MonkeyPatch, verdict: str, stage: str, stages: list[str]
) -> None:
    conditions(
        monkeypatch,
        lambda **given: (recordings.condition(verdict if given["stage"] == stage else "ok", "greedy"),),
    )
    run = flow(session)
    with pytest.raises(UserError, match=f"greedy is {verdict}: requested True") as caught:
        run.run()
    assert "--allow greedy" in caught.value.hint
    assert "switch it on" in caught.value.hint
    assert session.stages == [*stages, "closed"]
    assert run.report.verdict == "not comparable"
    assert "greedy" in run.report.reason
    record = run_record(recordings.case(), recordings.info(), session.outcome, run.report, ["align"])
    assert json.loads(json.dumps(record))["conditions"][0]["verdict"] == verdict


def test_an_allowed_condition_marks_the_verdict(session: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions(monkeypatch, lambda **given: (recordings.condition("false", allowed="eager" in given["allow"]),))
    report = flow(session, allow=("eager",)).run()
    assert report.verdict == "aligned"
    assert [one.name for one in report.tainted] == ["eager"]
    assert report_record(report)["allowed"] == ["eager"]
    assert compare(session)["allowed"] == ["eager"], "what the run was allowed, its traces are"


def test_what_the_workers_were_fed_is_a_condition(session: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def judge(**given: Any) -> tuple[Condition, ...]:
        seen.append(given["sides"])
        return (recordings.condition(),)

    conditions(monkeypatch, judge)
    flow(session).run()
    assert {side.token_ids is None for sides in seen[:-1] for side in sides.values()} == {True}
    for side in seen[-1].values():
        assert side.token_ids == traces.PROMPTS
        assert side.files == {"model.safetensors": "00"}


def test_inputs_that_were_not_recorded_only_inform(session: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions(monkeypatch, lambda **_: (recordings.condition("unknown", "token_ids"),))
    report = flow(session, tensors=False).run()
    assert [(one.verdict, one.blocks) for one in report.conditions] == [("unknown", False)]
    session.stages.clear()
    with pytest.raises(UserError, match="token_ids is unknown"):
        flow(session).run()


def test_a_side_that_fails_because_of_a_condition(session: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    session.failure = SideError("candidate", "the candidate failed to generate", "read its log")
    verdicts = iter(["ok", "false"])
    conditions(monkeypatch, lambda **_: (recordings.condition(next(verdicts), "greedy"),))
    with pytest.raises(UserError, match="greedy is false"):
        flow(session).run()
    assert session.stages == ["launch", "generate", "observe candidate", "closed"]


def test_a_side_that_fails_by_itself(session: Scripted) -> None:
    session.failure = SideError("reference", "the reference failed to generate", "read its log")
    run = flow(session)
    with pytest.raises(SideError) as caught:
        run.run()
    assert caught.value is session.failure
    assert run.report.reason == "the reference failed to generate"


def test_a_side_that_does_not_repeat_itself(session: Scripted) -> None:
    session.runs["reference"]["again"] = recordings.generations({"r0": (1, 2), "r1": (3, 5)})
    run = flow(session)
    with pytest.raises(UserError, match="the reference does not repeat itself: request r1, token 1 was 4, then 5"):
        run.run()
    stages = ["launch", "generate", "observe", "again", "fresh reference", "closed"]
    assert session.stages == stages, "nothing is compared"
    assert run.report.comparisons == {}
    assert [(one.side, one.stable) for one in run.report.fresh] == [("reference", False)]


def test_what_a_run_leaves_behind_is_a_finding(session: Scripted) -> None:
    session.runs["reference"] = {
        "again": recordings.generations({"r0": (1, 2), "r1": (3, 5)}),
        "fresh": recordings.generations(),
    }
    report = flow(session).run()
    assert report.verdict == "diverged" and session.stages[-2:] == ["fresh reference", "closed"]
    assert [(one.path, one.kind, one.side) for one in report.findings] == [("UNLOCATED", "residue", "reference")]
    assert "a fresh engine repeats the first" in report.findings[0].summary
    assert any("does not repeat itself" in one for one in report.remarks)


def test_fresh_engines_of_both_sides_if_asked(session: Scripted) -> None:
    report = flow(session, fresh=True).run()
    assert report.verdict == "aligned" and "fresh candidate reference" in session.stages
    assert all(one.stable for one in report.fresh) and len(report.fresh) == 2


def test_run_to_run_noise_is_measured(session: Scripted) -> None:
    session.runs["candidate"]["again"] = recordings.generations(logprob=-0.5)
    assert [one.noise for one in flow(session).run().stability] == [0.25, 0.0]


@pytest.mark.parametrize("role", SIDES)
def test_manifests_hold_the_side(session: Scripted, role: str) -> None:
    flow(session).run()
    content = json.loads((session.directories[role] / "trace" / "trace.json").read_text())
    assert (content["side"], content["engine"]) == (role, recordings.ENGINES[role])
    assert content["model"] == traces.CONFIG
    assert set(content["generations"]) == {"free", "again", "replay"}
    assert content["requests"][0] == {"name": "r0", "prompt_len": 3, "token_ids": [5, 6, 7]}
    assert content["checkpoint_files"] == {"model.safetensors": "00"}
    assert content["capture"]["values"] == ["*"]


def test_the_report_knows_what_each_side_ran_with(session: Scripted) -> None:
    session.outcome.sides["candidate"].extras = SideExtras({"x": 5}, ("/p/fix.py",))
    report = Flow(session, recordings.case(), recordings.info(), Wishes(tensors=False)).run()  # type: ignore[arg-type]
    assert report.extras["candidate"].patches == ("/p/fix.py",)
    assert not report.extras["reference"].options


def test_what_stopped_a_run_is_kept_as_data(session: Scripted) -> None:
    session.runs["candidate"]["again"] = recordings.generations({"r0": (1, 9), "r1": (3, 4)})
    flow = Flow(session, recordings.case(), recordings.info(), Wishes())  # type: ignore[arg-type]
    with pytest.raises(UserError):
        flow.run()
    told = flow.report.reason_told
    assert told is not None and text_of(told) == flow.report.reason
    assert text_of(told, "zh").startswith("无法比较：候选侧不能重复自身：请求 r0 的第 1 个 token 先为 ")


def tied(first: int, other: int, gap: float) -> tuple[Generation, ...]:
    """The usual tokens, but the last one of r1 is ``first``, which is preferred to ``other`` by ``gap``."""
    r0, r1 = recordings.generations()
    step = TokenStep(first, first, ((first, -0.25), (other, -0.25 - gap)), 7.0)
    return r0, Generation("r1", (*r1.steps[:-1], step))


@pytest.mark.parametrize(("cached", "gap", "steady"), [(True, 0.001, True), (False, 0.001, False), (True, 2.0, False)])
def test_after_a_prefix_hit_a_near_tie_is_no_unsteadiness(
    session: Scripted, cached: bool, gap: float, steady: bool
) -> None:
    """What the first run left in a prefix cache the second one does not compute, so that its rounding is another."""
    launch = session.launch

    def launched() -> None:
        launch()
        session.outcome.sides["reference"].observations.append(Observation("prefix_caching", cached, "config"))

    session.launch = launched  # type: ignore[method-assign]
    session.runs["reference"] = {"free": tied(4, 5, gap), "again": tied(5, 4, gap), "fresh": tied(4, 5, gap)}
    report = flow(session).run()
    assert ("fresh reference" in session.stages) is not steady
    assert (report.stability[1].stable, report.stability[1].near_ties) == (steady, int(steady))
    assert bool(report.findings) is not steady


def test_an_engine_that_fails_with_two_requests_leaves_what_was_found(
    session: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise SideError("candidate", "the candidate (lmdeploy) failed to replay: IndexError", "read its log")

    monkeypatch.setattr("align.run.flow.find_pair", failing)
    session.edits["candidate"] = twice_up
    session.batch_only = True
    report = flow(session).run()
    assert report.verdict == "diverged" and report.findings
    assert report.alone is not None and report.alone.pair is None
    assert any("two requests by themselves could not be tried" in one for one in report.remarks)
    assert session.stages[-2:] == ["record alone", "closed"] and not report.transplants


def test_an_engine_that_fails_with_a_request_by_itself_leaves_what_was_found(
    session: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong exchange may leave a rank without rows when the batch is smaller, and an operator refuses that."""

    def failing(*_: Any, **__: Any) -> None:
        raise SideError("candidate", "the candidate (lmdeploy) failed to replay: IndexError", "read its log")

    monkeypatch.setattr("align.run.flow.record_alone", failing)
    session.edits["candidate"] = twice_up
    report = flow(session).run()
    assert report.verdict == "diverged" and report.findings
    assert report.alone is None and not report.transplants
    assert any("could not be run by itself" in one and "IndexError" in one for one in report.remarks)
