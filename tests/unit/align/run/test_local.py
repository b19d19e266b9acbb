"""A side whose host is a process at the end of a pipe: the same answers and the same ends as an actor's."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.base import EngineSpec, Request
from adapters.probe.spec import CaptureSpec
from align.errors import SideError
from align.run import guardian
from align.run.local import LocalHosts
from align.run.side import Limits, Side
from align.run.transport import HostDied, Pending
from envs.home import REPOSITORY
from envs.profiles import Interpreter
from tests.unit.align.run import processes

REQUESTS = (Request("r0", (1, 2), 3),)
Start = Callable[..., Side]


def spec(model: str = "tiny", **options: object) -> EngineSpec:
    return EngineSpec("fake", "candidate", model, "bfloat16", "/w", options=dict(options))


def answer(pending: Pending) -> Any:
    assert processes.wait_until(lambda: pending.poll(0.2), 20)
    return pending.result()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHosts]:
    monkeypatch.setenv("PYTHONHOME", "")  # as good as absent, but seen if it is handed on
    with LocalHosts() as made:
        yield made
    assert guardian.marked(made.run_id) == [], "processes outlive the run"


@pytest.fixture
def make(hosts: LocalHosts, tmp_path: Path) -> Start:
    path = tmp_path / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text("import tests.unit.align.run.local_engine\n")

    def side(limits: Limits | None = None, python: Path = Path(sys.executable)) -> Side:
        interpreter = Interpreter("fake", "simnpu", python, (str(path), str(REPOSITORY)), {"NAME": "value"}, True)
        directory = tmp_path / "candidate"
        quiet: Callable[[str, str], None] = lambda stage, detail: None  # noqa: E731
        return Side(hosts, "candidate", interpreter, directory, limits or Limits(), quiet, threading.Event())

    return side


def test_calls_are_answered(make: Start, hosts: LocalHosts) -> None:
    side = make()
    launched = side.launch(spec())
    assert launched.python == sys.executable
    assert launched.pid in guardian.marked(hosts.run_id)
    seen = {one.name: one.value for one in side.observe()}
    assert seen["name"] == "value"
    assert seen["home"] is False, "the driver's own Python is not the engine's"
    assert seen["cwd"] == str(side.directory)
    assert str(side.directory) not in seen["path"], "a file there would hide a module"
    assert side.generate(REQUESTS, 5).seconds == 5.0
    assert side.replay(REQUESTS, 5, CaptureSpec("/trace")).seconds == 6.0
    side.close()
    log = (side.directory / "engine.log").read_text()
    assert "said on stdout" in log
    assert "closed" in log


def test_a_failure_is_told_with_the_log(make: Start) -> None:
    with pytest.raises(SideError, match="failed to launch: LookupError: no such model") as caught:
        make().launch(spec("broken"))
    assert any("LookupError" in line for line in caught.value.log_tail)


@pytest.mark.parametrize(("top_k", "words"), [(9, "was killed by signal 9"), (7, "ended with exit code 3")])
def test_a_dead_host_is_noticed_at_once(make: Start, top_k: int, words: str) -> None:
    side = make()
    side.launch(spec())
    started = time.monotonic()
    with pytest.raises(SideError, match=f"died during generate: its process {words}"):
        side.generate(REQUESTS, top_k)
    assert time.monotonic() - started < 5
    with pytest.raises(SideError, match="died before observe"):
        side.observe()


def test_a_step_that_hangs_is_killed(make: Start) -> None:
    side = make(Limits(step=0.5))
    launched = side.launch(spec(child=True))
    (child,) = launched.workers
    with pytest.raises(SideError, match="made no step for 0 s"):
        side.generate(REQUESTS, 8)
    assert processes.wait_until(lambda: not any(map(processes.is_alive, (launched.pid, child))), 5)


def test_an_interpreter_that_does_not_start(make: Start, tmp_path: Path) -> None:
    with pytest.raises(SideError, match=r"nowhere cannot be started: No such file"):
        make(python=tmp_path / "nowhere").launch(spec())


def test_an_interpreter_without_the_engines_code(hosts: LocalHosts, tmp_path: Path) -> None:
    host = hosts.start(Path(sys.executable), {"PYTHONPATH": ""}, "fake", tmp_path)
    with pytest.raises(HostDied, match="exit code 1"):
        answer(host.call("observe"))
    assert "No module named" in (tmp_path / "engine.log").read_text()


def test_leaving_ends_everything(make: Start, hosts: LocalHosts) -> None:
    launched = make().launch(spec(child=True))
    hosts.close()
    hosts.close()
    assert not any(map(processes.is_alive, (launched.pid, *launched.workers)))


def test_the_host_ends_with_the_driver(tmp_path: Path) -> None:
    """Killed with SIGKILL the driver tells nobody."""
    script = (
        "import sys, time; from pathlib import Path; from align.run.local import LocalHosts; hosts = LocalHosts(); "
        f"hosts.__enter__(); host = hosts.start(Path(sys.executable), {{'PYTHONPATH': {str(REPOSITORY)!r}}}, 'vllm', "
        f"Path({str(tmp_path)!r})); print(hosts.run_id, flush=True); time.sleep(60)"
    )
    driver = processes.start(sys.executable, "-c", script)
    try:
        assert driver.stdout is not None
        run_id = driver.stdout.readline().strip()
        assert processes.wait_until(lambda: len(guardian.marked(run_id)) == 1, 10)
        os.kill(driver.pid, signal.SIGKILL)
        assert processes.wait_until(lambda: guardian.marked(run_id) == [], 10)
    finally:
        driver.kill()
        driver.wait()
