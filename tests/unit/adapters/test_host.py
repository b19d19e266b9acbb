"""The actor's class around a fake engine: output, progress, failures as data, and the end with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from adapters import host
from adapters.base import Adapter
from envs.home import REPOSITORY
from tests.unit.align.run import processes

SCRIPT = Path(__file__).with_name("host_session.py")
ENV = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def session(what: str, directory: Path) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    command = [sys.executable, str(SCRIPT), what, str(directory)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60, check=False)
    log = directory / "engine.log"
    assert done.returncode == 0, log.read_text() if log.exists() else done.stderr
    answer: dict[str, Any] = json.loads((directory / "answer.json").read_text())
    return answer, done


def test_calls_and_output(tmp_path: Path) -> None:
    answer, done = session("calls", tmp_path)
    assert (done.stdout, done.stderr) == ("", ""), "all output belongs to the log"
    log = (tmp_path / "engine.log").read_text()
    for said in (
        "said on stdout",
        "said on file descriptor 2",
        "said by a child",
        "[align] build tiny",
        "[align] ready",
    ):
        assert said in log
    launched = answer["launched"]
    assert launched["type"] == "Launched"
    assert launched["python"] == sys.executable
    assert launched["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert launched["workers"] == []
    assert launched["simulated"] is False
    assert launched["versions"]["ray"]
    assert "vllm" not in launched["versions"], "what is not installed has no version"
    assert answer["ready"]["stage"] == "ready"
    assert [entry["name"] for entry in answer["observed"]] == ["tp", "dp"]
    assert answer["free"] == {
        "type": "RunResult", "generations": [], "steps": [], "seconds": 5.0, "run": 0, "dummies": []
    }  # fmt: skip
    assert (answer["stage"]["stage"], answer["stage"]["detail"]) == ("generate", "1 requests")
    assert answer["recorded"]["seconds"] == 7.0, "an adapter with a probe gets the capture"
    assert answer["closed"] is None


def test_failures_come_back_as_text(tmp_path: Path) -> None:
    answer, _ = session("failures", tmp_path)
    assert {entry["type"] for entry in answer.values()} == {"Failure"}
    assert (answer["broken"]["kind"], answer["broken"]["message"]) == ("LookupError", "no such\nmodel")
    assert "in launch" in answer["broken"]["traceback"]
    assert answer["broken"]["hint"] == "", "what to do about an engine's own error is not known"
    assert (answer["mistaken"]["message"], answer["mistaken"]["hint"]) == ("no option blok_size", "correct it")
    assert answer["mixed"]["kind"] == "AssertionError"
    assert "No space left on device" in answer["full"]["message"]
    assert answer["unwritable"]["kind"] == "IsADirectoryError", "also what the host itself cannot do"
    assert "LookupError: no such" in (tmp_path / "engine.log").read_text()


def test_any_thread_may_report(tmp_path: Path) -> None:
    answer, _ = session("threads", tmp_path)
    assert answer["errors"] == []
    assert not list(tmp_path.glob("progress.json.*"))


def test_workers_are_the_live_processes_below(tmp_path: Path) -> None:
    answer, _ = session("children", tmp_path)
    assert answer["names"] == ["sh", "sleep"], "nearest first, without what has ended"


def test_children_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    script = tmp_path / "odd ) name (R 1"
    script.write_text("#!/bin/sh\nsleep 60 &\necho $!\nwait\n")
    script.chmod(0o755)
    process = subprocess.Popen([str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert host._children(process.pid) == [child]
        assert process.pid in host._children(os.getpid())
        os.kill(child, 9)
    finally:
        process.kill()
        process.wait()


def test_the_engine_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is Ray's raylet; killed with SIGKILL it tells nobody."""
    command = f"exec 3>&-; {sys.executable} {SCRIPT} orphan {tmp_path} & wait"
    parent = subprocess.Popen(["sh", "-c", command], env=ENV)
    pids: list[int] = []
    try:
        assert processes.wait_until(lambda: _answered(tmp_path), 20)
        launched = json.loads((tmp_path / "answer.json").read_text())["launched"]
        pids = [launched["pid"], *launched["workers"]]
        assert len(pids) == 3
        assert all(map(processes.is_alive, pids))
    finally:
        parent.kill()
        parent.wait()
    assert processes.wait_until(lambda: not any(map(processes.is_alive, pids)), 5)


def _answered(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "answer.json").read_text()))
    except (FileNotFoundError, ValueError):
        return False


def test_every_adapter_is_where_the_table_says() -> None:
    """Naming an adapter imports no engine, so this can be looked up in any interpreter."""
    for name, place in host.ADAPTERS.items():
        module, _, cls = place.partition(":")
        adapter = getattr(import_module(module), cls)
        assert issubclass(adapter, Adapter)
        assert adapter.name == name
