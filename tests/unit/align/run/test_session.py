"""One comparison over two scripted sides."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import SIDES, Observation, Request
from adapters.probe.spec import CaptureSpec
from align.case.schema import Batch, CaseLayout, CaseRequest, Decoding
from align.errors import SideError, UserError
from align.run import session as session_module
from align.run.plan import SideExtras, check_launchable, engine_spec, forced_along
from align.run.session import Session
from align.run.side import Aborted, Limits
from envs.profiles import Interpreter
from tests.unit.align.run import fakes

# ------------------------------------------------------------------------------------------------- pure functions

rows = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=5)


@given(rows, st.sampled_from([16, 64, 128]), st.booleans())
def test_engine_spec_makes_room_for_the_case(shapes: list[tuple[int, int]], block: int, together: bool) -> None:
    requests = [
        CaseRequest(name=f"r{at}", token_ids=(1,) * prompt, max_new_tokens=new)
        for at, (prompt, new) in enumerate(shapes)
    ]
    given_case = fakes.case(*requests, batch=Batch(block_size=block, together=together), dtype="float16")
    specs = [
        engine_spec(given_case, fakes.info(), engine=engine, role=role, device="simnpu", work_dir=Path("/w", role))
        for role, engine in zip(SIDES, ("lmdeploy", "vllm"), strict=True)
    ]
    spec = specs[0]
    assert spec.max_model_len >= max(prompt + new for prompt, new in shapes)
    assert spec.max_prefill_tokens > sum(prompt for prompt, _ in shapes), "lmdeploy splits what reaches its limit"
    assert spec.max_batch >= len(shapes)
    assert spec.num_blocks >= sum(-(-(prompt + new) // block) for prompt, new in shapes)
    assert spec.max_model_len % block == spec.max_prefill_tokens % block == 0
    assert (spec.dtype, spec.block_size, spec.hold_arrivals) == ("float16", block, together)
    assert (spec.engine, spec.side, spec.work_dir) == ("lmdeploy", "candidate", "/w/candidate")
    own = ("engine", "side", "work_dir")
    assert {name: value for name, value in vars(spec).items() if name not in own} == {
        name: value for name, value in vars(specs[1]).items() if name not in own
    }, "both engines are asked for the same"


def test_engine_spec_carries_the_layout() -> None:
    spec = engine_spec(
        fakes.case(layout=CaseLayout(tp=2)),
        fakes.info(),
        engine="vllm",
        role="reference",
        device="ascend",
        work_dir=Path("/w"),
    )
    assert (spec.tp, spec.dp, spec.ep, spec.device, spec.model_path) == (2, 1, 1, "ascend", "/models/tiny")


def test_forced_along_forces_what_was_generated() -> None:
    requests = (
        Request("a", (1, 2), 5, arrival=3, dp_rank=1, stop_ids=(2,)),
        Request("b", (3,), 4),
    )
    forced = forced_along(requests, fakes.result(b=(7, 8, 9, 10), a=(5, 2)).generations)
    assert forced == (
        Request("a", (1, 2), 2, arrival=3, dp_rank=1, forced=(5, 2), stop_ids=()),
        Request("b", (3,), 4, forced=(7, 8, 9, 10)),
    ), "as long as the reference ran, and no end id ends it earlier"


def test_engine_spec_carries_what_one_side_alone_is_asked_for() -> None:
    extras = SideExtras({"sampling.top_k": 5}, ("/fix.py",))
    given: dict[str, Any] = {"engine": "vllm", "role": "reference", "device": "simnpu", "work_dir": Path("/w")}
    spec = engine_spec(fakes.case(), fakes.info(), **given, extras=extras)
    assert (spec.options, spec.patches, spec.audit) == ({"sampling.top_k": 5}, ("/fix.py",), True)
    assert not engine_spec(fakes.case(), fakes.info(), **given, audit=False).audit


def test_tokens_to_follow_must_be_there() -> None:
    with pytest.raises(ValueError, match="no tokens to follow for request b"):
        forced_along((Request("a", (1,), 1), Request("b", (1,), 1)), fakes.result(a=(5,), b=()).generations)


def test_every_layout_is_launched() -> None:
    for layout in (CaseLayout(tp=4), CaseLayout(dp=2), CaseLayout(tp=2, dp=2), CaseLayout(dp=2, ep=2)):
        check_launchable(fakes.case(layout=layout))


@pytest.mark.parametrize("role", SIDES)
def test_engines_that_are_no_side_are_refused_early(role: Any) -> None:
    with pytest.raises(UserError, match=f"the case's {role} is transformers") as caught:
        check_launchable(fakes.case(**{role: "transformers"}))
    assert "lmdeploy, vllm" in caught.value.hint


# -------------------------------------------------------------------------------------------------------- session


class ScriptedSide:
    """Follows ``script[role][method]``: a value, an error, or a function of the side."""

    script: dict[str, dict[str, Any]]
    log: list[str]

    def __init__(self, cluster: Any, role: str, interpreter: Interpreter, directory: Path, *rest: Any) -> None:
        _, self._on_progress, self.abort = rest
        self.role, self.engine, self.directory = role, interpreter.engine, directory
        if "init" in self.script[role]:
            self._do("init")

    def _do(self, method: str, *args: Any) -> Any:
        self.log.append(f"{self.role} {method}")
        answer = self.script[self.role].get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer(self, *args) if callable(answer) else answer

    def launch(self, spec: Any) -> Any:
        self._on_progress("build", spec.engine)
        return self._do("launch", spec) or fakes.launched()

    def observe(self) -> Any:
        return self._do("observe") or [Observation("tp", 1, self.role)]

    def generate(self, requests: Any, top_k: int) -> Any:
        return self._do("generate", requests, top_k)

    def replay(self, requests: Any, top_k: int, capture: Any = None) -> Any:
        return self._do("replay", requests, top_k, capture)

    def close(self) -> None:
        self._do("close")


class ScriptedCluster:
    waits_for = "Ray"
    log: list[str]

    def __enter__(self) -> ScriptedCluster:
        self.log.append("cluster enter")
        return self

    def close(self) -> None:
        self.log.append("cluster close")


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def update(self, role: str, stage: str, detail: str) -> None:
        self.seen.append((role, stage, detail))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order; scripts are set per test."""
    events: list[str] = []
    monkeypatch.setattr(ScriptedSide, "script", {role: {} for role in SIDES}, raising=False)
    monkeypatch.setattr(ScriptedSide, "log", events, raising=False)
    monkeypatch.setattr(ScriptedCluster, "log", events, raising=False)
    monkeypatch.setattr(session_module, "Side", ScriptedSide)
    monkeypatch.setattr(session_module, "Cluster", ScriptedCluster)
    monkeypatch.setattr(session_module, "_POLL_SECONDS", 0.01)
    return events


def make(tmp_path: Path, watcher: Any = None) -> Session:
    engines = dict(zip(SIDES, ("lmdeploy", "vllm"), strict=True))
    interpreters = {
        role: Interpreter(engine, "simnpu", Path("/python"), (), {}, True) for role, engine in engines.items()
    }
    case = fakes.case(decoding=Decoding(max_new_tokens=2, top_logprobs=3))
    return Session(case, fakes.info(), interpreters, tmp_path, Limits(), watcher or Watcher())


def run_all(session: Session) -> None:
    with session:
        session.launch()
        session.generate()


def test_stages_fill_the_outcome(tmp_path: Path, log: list[str]) -> None:
    asked: dict[str, Any] = {}

    def replay(side: ScriptedSide, requests: Any, top_k: int, capture: Any) -> Any:
        asked[side.role] = requests, top_k
        side._on_progress("replay", capture)
        return fakes.result(r0=(4, 5))

    for role, ids in (("candidate", (4, 9)), ("reference", (4, 5))):
        ScriptedSide.script[role] = {"generate": fakes.result(r0=ids), "replay": replay}
    captures = {"candidate": CaptureSpec("/trace")}
    watcher = Watcher()
    with make(tmp_path, watcher) as session:
        session.launch()
        session.generate()
        session.generate_again()
        session.say("compare", "tensors")
        session.replay(captures=captures)
    sides = session.outcome.sides
    assert {role: side.engine for role, side in sides.items()} == {"candidate": "lmdeploy", "reference": "vllm"}
    for role in SIDES:
        assert sides[role].launched == fakes.launched()
        assert sides[role].observations == [Observation("tp", 1, role)]
        assert sides[role].replay == fakes.result(r0=(4, 5))
        assert sides[role].again == sides[role].free != fakes.result(r0=(4, 5)) or role == "reference"
        assert sides[role].spec is not None
        assert sides[role].captures == ([captures[role]] if role in captures else [])
        recorded: list[Any] = [seen for seen in watcher.seen if seen[0] == role]
        assert (role, "wait", "for Ray") in watcher.seen
        assert (role, "compare", "tensors") in watcher.seen
        assert ("record", captures.get(role)) in [seen[1:] for seen in recorded], (
            "a replay that is recorded is called so"
        )
        assert asked[role] == ((Request("r0", (1, 2, 3), 2, forced=(4, 5)),), 3), "along the reference, on both sides"
    assert log[0] == "cluster enter"
    assert log[-3:] == ["candidate close", "reference close", "cluster close"]


def test_both_sides_work_at_once(tmp_path: Path, log: list[str]) -> None:
    barrier = threading.Barrier(2, timeout=10)
    for role in SIDES:
        ScriptedSide.script[role] = {"launch": lambda side, spec: barrier.wait() and None}
    with make(tmp_path) as session:
        session.launch()


@pytest.mark.parametrize("role", SIDES)
def test_the_first_failure_stops_the_other_side(role: str, tmp_path: Path, log: list[str]) -> None:
    other = next(one for one in SIDES if one != role)

    def wait(side: ScriptedSide, *_: Any) -> Any:
        assert side.abort.wait(10), "nobody said to stop"
        raise Aborted

    error = SideError(role, "it died", "read its log")
    ScriptedSide.script[role]["generate"] = error
    ScriptedSide.script[other]["generate"] = wait
    started = time.monotonic()
    session = make(tmp_path)
    with pytest.raises(SideError) as caught:
        run_all(session)
    assert caught.value is error
    assert time.monotonic() - started < 5
    assert session.outcome.sides[role].free is None
    assert session.outcome.sides[role].launched is not None, "what is known is kept"
    assert "cluster close" in log
    assert not any(event.endswith(" close") and not event.startswith("cluster") for event in log), "no polite end"


def test_an_interrupt_ends_everything(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        """Ctrl-C reaches the main thread while it waits for both sides to generate."""
        if "reference generate" in log:
            raise KeyboardInterrupt
        return concurrent.futures.wait(*args, **kwargs)

    def wait(side: ScriptedSide, *_: Any) -> Any:
        if not side.abort.wait(10):
            raise LookupError("nobody said to stop")
        raise Aborted

    for role in SIDES:
        ScriptedSide.script[role]["generate"] = wait
    monkeypatch.setattr(session_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(make(tmp_path))
    assert log[-1] == "cluster close"


def test_a_side_that_cannot_be_made_closes_the_cluster(tmp_path: Path, log: list[str]) -> None:
    ScriptedSide.script["reference"]["init"] = UserError("no space is left", "free some")
    with pytest.raises(UserError), make(tmp_path):
        raise AssertionError("entered")
    assert log[-1] == "cluster close"


def test_the_sides_are_reachable_by_role(tmp_path: Path, log: list[str]) -> None:
    with make(tmp_path) as session:
        side: Any = session.side("reference")
        assert (side.role, side.directory) == ("reference", tmp_path / "reference")


def test_one_side_alone(tmp_path: Path, log: list[str]) -> None:
    asked: list[Any] = []

    def replay(side: ScriptedSide, requests: Any, top_k: int, capture: Any) -> Any:
        asked.append((requests, capture))
        return fakes.result(r0=(8, 9))

    ScriptedSide.script["reference"] = {"generate": fakes.result(r0=(4, 5)), "replay": replay}
    interpreter = Interpreter("vllm", "simnpu", Path("/python"), (), {}, True)
    hosts: Any = ScriptedCluster()
    extras = {"reference": SideExtras({"seed": 3})}
    session = Session(
        fakes.case(decoding=Decoding(max_new_tokens=2)), fakes.info(), {"reference": interpreter}, tmp_path, Limits(),
        Watcher(), extras, hosts, {"reference": tmp_path / "engine"},
    )  # fmt: skip
    assert session.outcome.sides["reference"].extras == extras["reference"]
    with session:
        session.launch()
        session.generate()
        session.replay(fakes.result(r0=(8, 9)).generations, {"reference": CaptureSpec("/trace")})
    ((requests, capture),) = asked
    assert requests == (Request("r0", (1, 2, 3), 2, forced=(8, 9)),), "along the tokens of another trace"
    assert capture == CaptureSpec("/trace")
    assert session.roles == ("reference",)
    side: Any = session.side("reference")
    assert side.directory == tmp_path / "engine"
    spec = session.outcome.sides["reference"].spec
    assert spec is not None
    assert spec.options == {"seed": 3}
    assert log[-2:] == ["reference close", "cluster close"]


def test_a_side_may_be_asked_again_after_a_failure(tmp_path: Path, log: list[str]) -> None:
    ScriptedSide.script["candidate"]["generate"] = SideError("candidate", "it failed", "read its log")
    session = make(tmp_path)

    def run() -> None:
        with session:
            session.launch()
            try:
                session.generate()
            except SideError:
                side: Any = session.side("candidate")
                assert side.abort.is_set()
                session.observe_again("candidate")
                assert not side.abort.is_set(), "waiting would end at once"
                raise

    with pytest.raises(SideError):
        run()
    assert log.count("candidate observe") == 2
