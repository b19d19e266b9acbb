"""The watch over one side: failures, death, hangs, and the other side's trouble."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import probe
from adapters.base import EngineSpec, Observation, Request, RunResult
from adapters.host import Failure
from adapters.mistakes import Mistake, leave_mistake
from adapters.probe.spec import CaptureSpec
from align.errors import SideError, UserError
from align.run import guardian
from align.run import side as side_module
from align.run.side import Aborted, Limits, Side
from envs.profiles import Interpreter
from tests.unit.align.run import fakes, processes

SPEC = EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w")
REQUESTS = (Request("r0", (1, 2), 3),)
PYTHON = Path("/env/bin/python")


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fakes.fake_ray())
    monkeypatch.setattr(side_module, "_POLL_SECONDS", 0.01)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a side over a scripted actor: ``(side, actor, progress so far)``."""
    actors = []

    def side(
        script: dict[str, Any], limits: Limits | None = None, abort: threading.Event | None = None, run_id: str = "none"
    ) -> tuple[Side, fakes.FakeActor, list[tuple[str, str]]]:
        actor = fakes.FakeActor({"close": None, "launch": fakes.launched(), **script})
        actors.append(actor)
        cluster: Any = fakes.FakeCluster(actor, run_id)
        interpreter = Interpreter("lmdeploy", "simnpu", PYTHON, ("/repo", "/sim"), {"NAME": "value"}, True)
        progress: list[tuple[str, str]] = []
        made = Side(
            cluster, "candidate", interpreter, tmp_path / "candidate", limits or Limits(),
            lambda stage, detail: progress.append((stage, detail)), abort or threading.Event(),
        )  # fmt: skip
        return made, actor, progress

    yield side
    for actor in actors:
        actor.end()


def start(make: Callable[..., Any], script: dict[str, Any], **arguments: Any) -> tuple[Side, fakes.FakeActor, Any]:
    side, actor, progress = make(script, **arguments)
    side.launch(SPEC)
    return side, actor, progress


def test_launch_starts_the_host_in_the_engines_interpreter(make: Callable[..., Any]) -> None:
    side, actor, _ = make({"launch": fakes.launched(7, (8,))})
    assert side.launch(SPEC) == side.launched == fakes.launched(7, (8,))
    ((python, env, engine, directory),) = side._hosts.started
    assert (python, engine, directory) == (PYTHON, "lmdeploy", side.directory)
    assert env == {
        "NAME": "value",
        "PYTHONPATH": os.pathsep.join(["/repo", "/sim", str(probe.PATH)]),
        "ALIGN_PROBE_DIR": str(side.directory),
    }
    assert actor.calls == [("launch", (SPEC,))]


def test_calls_return_what_the_engine_answers(make: Callable[..., Any]) -> None:
    seen = [Observation("tp", 1, "config")]
    free, replay = fakes.result(r0=(1,)), fakes.result(r0=(2,))
    side, actor, _ = start(make, {"observe": seen, "generate": free, "replay": replay})
    assert side.observe() == seen
    assert side.generate(list(REQUESTS), 5) is free
    assert side.replay(REQUESTS, 5) is replay
    capture = CaptureSpec("/trace")
    assert side.replay(REQUESTS, 5, capture) is replay
    assert actor.calls[2:] == [
        ("generate", (REQUESTS, 5)),
        ("replay", (REQUESTS, 5)),
        ("replay", (REQUESTS, 5, capture)),
    ]


def test_a_failure_of_the_engine_is_told_with_its_last_lines(make: Callable[..., Any]) -> None:
    side, _, _ = make({"launch": Failure("ValueError", "no such dtype\n", "Traceback …")})
    log = side.directory / "engine.log"
    log.write_bytes(b"\xff broken\n" + b"\n".join(b"line %d" % number for number in range(40)) + b"\n\n")
    with pytest.raises(SideError) as caught:
        side.launch(SPEC)
    assert caught.value.side == "candidate"
    assert caught.value.message == "the candidate (lmdeploy) failed to launch: ValueError: no such dtype"
    assert str(log) in caught.value.hint
    assert caught.value.log_tail == tuple(f"line {number}" for number in range(28, 40))
    assert caught.value.exit_code == 2


def test_a_failure_without_a_log(make: Callable[..., Any]) -> None:
    side, _, _ = make({"launch": Failure("ValueError", "early", "")})
    with pytest.raises(SideError) as caught:
        side.launch(SPEC)
    assert caught.value.log_tail == ()


def test_a_mistake_of_the_user_is_told_without_the_log(make: Callable[..., Any]) -> None:
    side, _, _ = make({"launch": Failure("Mistake", "no option blok_size", "Traceback …", "correct it")})
    (side.directory / "engine.log").write_text("our own stack\n")
    with pytest.raises(SideError) as caught:
        side.launch(SPEC)
    assert caught.value.message == "the candidate (lmdeploy) failed to launch: no option blok_size"
    assert (caught.value.hint, caught.value.log_tail) == ("correct it", ())


@pytest.mark.parametrize("answer", ["hangs", "wraps", "dies"])
def test_a_mistake_that_a_worker_found(make: Callable[..., Any], answer: str) -> None:
    """Whatever the engine makes of its worker's exception."""
    side, actor, _ = make({})

    def launch(spec: EngineSpec) -> Any:
        leave_mistake(side.directory, Mistake("patch p.py: apply(ctx) failed", "correct the patch"))
        if answer == "hangs":
            actor.hang()
        if answer == "dies":
            raise fakes.ActorDiedError("gone")
        return Failure("RuntimeError", "engine core failed, see above", "Traceback …")

    actor.script["launch"] = launch
    started = time.monotonic()
    with pytest.raises(SideError) as caught:
        side.launch(SPEC)
    assert time.monotonic() - started < 5
    assert caught.value.message == "the candidate (lmdeploy) failed to launch: patch p.py: apply(ctx) failed"
    assert (caught.value.hint, caught.value.log_tail) == ("correct the patch", ())


def test_what_this_side_alone_ran_with_is_the_first_suspect(make: Callable[..., Any]) -> None:
    side, _, _ = make({"launch": Failure("AssertionError", "", "Traceback …")})
    spec = dataclasses.replace(SPEC, options={"block_size": 7, "sampling.top_k": 5, "dtype": "x"}, patches=("/fix.py",))
    with pytest.raises(SideError) as caught:
        side.launch(spec)
    assert caught.value.hint.startswith(
        "leave out --set candidate.block_size=7 --set candidate.sampling.top_k=5 --set candidate.dtype=x "
        "--patch candidate=/fix.py, which this side alone ran with"
    )
    assert str(side.directory / "engine.log") in caught.value.hint


def test_a_full_disk_is_told_as_such(make: Callable[..., Any]) -> None:
    side, _, _ = start(make, {"generate": Failure("OSError", os.strerror(errno.ENOSPC), "")})
    (side.directory / "engine.log").write_text("Traceback (most recent call last):\n")
    with pytest.raises(SideError) as caught:
        side.generate(REQUESTS, 5)
    assert "free disk space" in caught.value.hint
    assert caught.value.log_tail == ()


def test_a_read_only_directory_is_told_as_such(make: Callable[..., Any]) -> None:
    side, actor, _ = start(make, {})
    for folder, ours in ((side.directory, True), (Path("/elsewhere"), False)):
        text = str(OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / "file")))
        actor.script["generate"] = Failure("OSError", text, "")
        with pytest.raises(SideError) as caught:
            side.generate(REQUESTS, 5)
        assert (f"make {side.directory} writable" in caught.value.hint) is ours


def test_a_dead_actor(make: Callable[..., Any]) -> None:
    side, _, _ = start(make, {"generate": fakes.ActorDiedError("a long text of Ray's\nwith lines")})
    with pytest.raises(SideError, match="died during generate: its process was killed or crashed"):
        side.generate(REQUESTS, 5)


def test_an_exception_that_is_no_failure_is_named(make: Callable[..., Any]) -> None:
    side, _, _ = start(make, {"observe": fakes.RayTaskError(TypeError("cannot pickle\nthis"))})
    with pytest.raises(SideError, match="died during observe: TypeError: cannot pickle") as caught:
        side.observe()
    assert "\n" not in caught.value.message


def test_a_launch_that_takes_too_long(make: Callable[..., Any]) -> None:
    side, actor, _ = make({}, limits=Limits(launch=0.1))
    actor.script["launch"] = actor.hang
    with pytest.raises(SideError, match="did not start within 0 s"):
        side.launch(SPEC)


def test_observe_is_bounded(make: Callable[..., Any]) -> None:
    side, actor, _ = start(make, {}, limits=Limits(step=0.1))
    actor.script["observe"] = actor.hang
    with pytest.raises(SideError, match="did not answer"):
        side.observe()


def test_a_step_that_takes_too_long(make: Callable[..., Any]) -> None:
    side, actor, _ = start(make, {}, limits=Limits(step=0.15))
    actor.script["generate"] = actor.hang
    started = time.monotonic()
    with pytest.raises(SideError, match="made no step for 0 s while it was to generate"):
        side.generate(REQUESTS, 5)
    assert 0.15 <= time.monotonic() - started < 3


def test_many_steps_may_take_longer_than_one(make: Callable[..., Any]) -> None:
    side, actor, progress = start(make, {}, limits=Limits(step=1.0))
    log = side.directory / "steps-rank0.jsonl"
    log.write_text('{"event": "step", "of": "an earlier run"}\n')
    fakes.tell_progress(side.directory, "generate", "1 requests")

    def slowly(*arguments: Any) -> Any:
        for _ in range(8):
            time.sleep(0.15)
            with log.open("a") as file:
                file.write('{"event": "step"}\n{"event": "tokens"}\n')
        time.sleep(0.05)
        return fakes.result(r0=(1,))

    actor.script["generate"] = slowly
    started = time.monotonic()
    assert side.generate(REQUESTS, 5) == fakes.result(r0=(1,))
    assert time.monotonic() - started > 1.1
    assert progress[-1] == ("generate", "step 8"), "earlier runs' steps are not counted"


def test_the_other_sides_trouble_ends_the_waiting(make: Callable[..., Any]) -> None:
    abort = threading.Event()
    side, actor, _ = start(make, {}, abort=abort)
    actor.script["generate"] = actor.hang
    threading.Timer(0.1, abort.set).start()
    started = time.monotonic()
    with pytest.raises(Aborted):
        side.generate(REQUESTS, 5)
    assert time.monotonic() - started < 2


def test_progress_is_passed_on(make: Callable[..., Any]) -> None:
    side, actor, progress = make({})

    def launch(spec: EngineSpec) -> Any:
        time.sleep(0.1)
        fakes.tell_progress(side.directory, "build", "tiny in bfloat16")
        time.sleep(0.1)
        return fakes.launched()

    actor.script["launch"] = launch
    side.launch(SPEC)
    assert progress[0] == ("start", "interpreter")
    assert progress[-1] == ("build", "tiny in bfloat16")


@pytest.mark.parametrize("collected", [True, False], ids=["collected", "zombie"])
def test_a_dead_worker_ends_the_side(make: Callable[..., Any], collected: bool) -> None:
    """Its parent, the engine, may wait for an answer for ever and never collect it."""
    run_id = uuid.uuid4().hex
    actor_process = processes.start("sleep", "60", run_id=run_id)
    worker = processes.start("sleep", "60", run_id=run_id)
    survivor = processes.start("sleep", "60", run_id=run_id)
    try:
        workers = (survivor.pid, worker.pid)
        side, actor, _ = start(make, {"launch": fakes.launched(actor_process.pid, workers)}, run_id=run_id)
        actor.script["generate"] = actor.hang

        def kill() -> None:
            worker.kill()
            if collected:
                worker.wait()

        threading.Timer(0.2, kill).start()
        started = time.monotonic()
        with pytest.raises(SideError, match=f"lost its worker process {worker.pid} during generate"):
            side.generate(REQUESTS, 5)
        assert time.monotonic() - started < 5
        assert actor_process.wait(5) == survivor.wait(5) == -signal.SIGKILL
    finally:
        for process in (actor_process, worker, survivor):
            process.kill()
            process.wait()


def test_kill_spares_processes_of_others(make: Callable[..., Any]) -> None:
    """A number may have been given to another process since."""
    stranger = processes.start("sleep", "60")
    try:
        side, _, _ = start(make, {"launch": fakes.launched(stranger.pid)}, run_id=uuid.uuid4().hex)
        side.kill()
        time.sleep(0.1)
        assert processes.is_alive(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_kill_survives_a_process_that_ends_meanwhile(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = processes.start("true")
    gone.wait()
    side, _, _ = start(make, {"launch": fakes.launched(gone.pid)})
    monkeypatch.setattr(guardian, "marked", lambda run_id: [gone.pid])
    side.kill()


def test_close_is_polite_and_bounded(make: Callable[..., Any]) -> None:
    side, actor, _ = start(make, {}, limits=Limits(close=0.2))
    side.close()
    side.close()
    assert [method for method, _ in actor.calls] == ["launch", "close"]


def test_close_kills_what_does_not_answer(make: Callable[..., Any]) -> None:
    run_id = uuid.uuid4().hex
    process = processes.start("sleep", "60", run_id=run_id)
    try:
        launched = fakes.launched(process.pid)
        side, actor, _ = start(make, {"launch": launched}, limits=Limits(close=0.1), run_id=run_id)
        actor.script["close"] = actor.hang
        side.close()
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_workers_may_go_while_the_engine_closes(make: Callable[..., Any]) -> None:
    run_id = uuid.uuid4().hex
    process = processes.start("sleep", "60", run_id=run_id)
    worker = processes.start("sleep", "60", run_id=run_id)
    try:
        side, actor, _ = start(make, {"launch": fakes.launched(process.pid, (worker.pid,))}, run_id=run_id)

        def close() -> None:
            worker.kill()
            worker.wait()
            time.sleep(0.2)

        actor.script["close"] = close
        side.close()
        assert processes.is_alive(process.pid), "the engine was killed in the middle of its clean-up"
    finally:
        for one in (process, worker):
            one.kill()
            one.wait()


def test_close_before_launch_does_nothing(make: Callable[..., Any]) -> None:
    side, actor, _ = make({})
    side.close()
    side.kill()
    assert actor.calls == []


def test_a_directory_that_cannot_be_made(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UserError, match="no space is left"):
        make({})


# ------------------------------------------------------------------------------------------------------- workers


def leave(side: Side, kind: str, rank: int, **about: Any) -> None:
    (side.directory / f"{kind}-rank{rank}.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("during", "words"), [("build", "rank 1 failed to build its model"), ("step", "rank 1 failed in a step")]
)
@pytest.mark.parametrize("answer", [None, Failure("RayTaskError", "somewhere", "Traceback of the caller")])
def test_a_worker_that_cannot_go_on_is_told_with_its_own_traceback(
    make: Callable[..., Any], answer: Any, during: str, words: str
) -> None:
    """Whether the engine waits for it for ever or passes on an error of its own."""
    side, actor, _ = make({})
    actor.script["launch"] = answer or actor.hang
    (side.directory / "engine.log").write_text("the other rank waits\n")
    leave(side, "failed", 1, during=during, error="MemoryError: no room", traceback="Traceback\n  at the weights\n")
    with pytest.raises(SideError, match=f"cannot go on: {words}: MemoryError: no room") as caught:
        side.launch(SPEC)
    assert caught.value.log_tail == ("Traceback", "  at the weights")


def test_a_worker_that_died_while_the_engine_is_built_ends_the_wait(make: Callable[..., Any]) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    side, actor, _ = make({})
    actor.script["launch"] = actor.hang
    leave(side, "worker", 0, pid=os.getpid())
    leave(side, "worker", 1, pid=child.pid)
    with pytest.raises(SideError, match=f"lost the worker of rank 1, process {child.pid}, during launch"):
        side.launch(SPEC)


# -------------------------------------------------------------------------------------------------------- groups


def test_every_group_has_a_host_and_results_stand_as_the_requests_do(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fakes answer alike, so that the merged answer has everything twice."""
    free = RunResult((fakes.generation("r1", 1), fakes.generation("r0", 2)), (), 1.0, run=1)
    side, actor, _ = make({"launch": fakes.launched(7, (8,)), "generate": free})
    side.launch(dataclasses.replace(SPEC, dp=2))
    assert len(side._hosts.started) == 2
    assert [spec.dp_rank for _, (spec,) in actor.calls] == [0, 1]
    ports = {spec.master_port for _, (spec,) in actor.calls}
    assert len(ports) == 1 and min(ports) > 1024, "the groups find each other at one free port"
    lines = [{"event": "dummy", "generation": 1, "tokens": 1, "idle": True, "cycle": 0, "mode": "decode"}]
    (side.directory / "steps-rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = side.generate((Request("r0", (1,), 1), Request("r1", (1,), 1)), 5)
    assert [one.request for one in found.generations] == ["r0", "r1"]
    assert [(one.rank, one.tokens, one.cycle) for one in found.dummies] == [(1, 1, 0)]


def test_variables_of_a_side_are_in_what_its_host_starts_with(make: Callable[..., Any]) -> None:
    """An engine's actors inherit the host's first environment, not what it sets later."""
    side, _, _ = make({})
    side.launch(dataclasses.replace(SPEC, options={"env.NAME": None, "env.OTHER": 5, "block_size": 64}))
    ((_, env, _, _),) = side._hosts.started
    assert env["OTHER"] == "5" and "NAME" not in env
