"""The process that ends a run's processes, against real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from align.run import guardian
from tests.unit.align.run import processes


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def spawn(run_id: str) -> Iterator[Callable[..., Any]]:
    """Starts processes that are ended afterwards, whatever happens."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str = "", marked: bool = True, command: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], str]:
        mark = run_id if marked else None
        if command:
            process, line = processes.start(*command, run_id=mark), ""
        else:
            process, line = processes.python(script, run_id=mark)
        started.append(process)
        return process, line

    yield run
    for process in started:
        process.kill()
        process.wait()
    for pid in guardian.marked(run_id):
        os.kill(pid, signal.SIGKILL)


def test_marked_finds_exactly_the_run(spawn: Callable[..., Any], run_id: str) -> None:
    mine, _ = spawn(command=("sleep", "60"))
    other, _ = spawn(marked=False, command=("sleep", "60"))
    parent, line = spawn(processes.PARENT)
    processes.wait_until(lambda: len(guardian.marked(run_id)) == 3)
    assert sorted(guardian.marked(run_id)) == sorted([mine.pid, parent.pid, int(line)])
    assert guardian.marked(run_id, frozenset({mine.pid})) == sorted(
        pid for pid in guardian.marked(run_id) if pid != mine.pid
    )
    assert other.pid not in guardian.marked(run_id)
    assert guardian.marked(run_id[:-1]) == [], "the beginning of a mark is another mark"


def test_zombies_are_not_counted(spawn: Callable[..., Any], run_id: str) -> None:
    process, _ = spawn(command=("true",))
    assert processes.wait_until(lambda: not processes.is_alive(process.pid))
    assert guardian.marked(run_id) == []


def test_sweep_asks_first(spawn: Callable[..., Any], run_id: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    polite = (
        "import signal, sys, time, pathlib\n"
        f"def leave(*_):\n    pathlib.Path({str(note)!r}).write_text('cleaned up')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    process, _ = spawn(polite)
    assert guardian.sweep(run_id, grace=10) == []
    assert process.wait(5) == 0
    assert note.read_text() == "cleaned up"


def test_sweep_kills_what_does_not_listen(spawn: Callable[..., Any], run_id: str) -> None:
    stubborn, line = spawn(processes.STUBBORN)
    assert line == "ready"
    started = time.monotonic()
    assert guardian.sweep(run_id, grace=0.3) == []
    assert 0.3 <= time.monotonic() - started < 3
    assert stubborn.wait(5) == -signal.SIGKILL


def test_sweep_does_not_wait_when_all_are_gone(run_id: str) -> None:
    started = time.monotonic()
    assert guardian.sweep(run_id, grace=30) == []
    assert time.monotonic() - started < 2


def test_sweep_reaches_stopped_processes(spawn: Callable[..., Any], run_id: str) -> None:
    process, _ = spawn(command=("sleep", "60"))
    os.kill(process.pid, signal.SIGSTOP)
    assert guardian.sweep(run_id, grace=0.3) == []
    assert process.wait(5) in (-signal.SIGTERM, -signal.SIGKILL)


def test_sweep_spares_whom_it_is_told_to(spawn: Callable[..., Any], run_id: str) -> None:
    spared, _ = spawn(command=("sleep", "60"))
    gone, _ = spawn(command=("sleep", "60"))
    stranger, _ = spawn(marked=False, command=("sleep", "60"))
    assert guardian.sweep(run_id, frozenset({spared.pid}), grace=5) == []
    assert gone.wait(5) == -signal.SIGTERM
    assert processes.is_alive(spared.pid)
    assert processes.is_alive(stranger.pid)


def test_sweep_names_what_it_could_not_end(
    spawn: Callable[..., Any], run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = spawn(command=("sleep", "60"))
    monkeypatch.setattr(guardian, "_signal", lambda *_: None)
    monkeypatch.setattr(guardian, "_POLL_SECONDS", 0.001)
    assert guardian.sweep(run_id, grace=0.01) == [process.pid]


@pytest.mark.parametrize("parent_dies_first", [False, True])
def test_a_child_that_lost_the_mark_is_ended(parent_dies_first: bool, spawn: Callable[..., Any], run_id: str) -> None:
    """Ray's agents write their titles over the environment, and are left alone when their parent is killed."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    script = (
        f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], env={{}}, "
        "stdout=subprocess.PIPE, text=True); child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    parent, line = spawn(script)
    child = int(line)
    assert child not in guardian.marked(run_id)
    family = guardian.Family(run_id)
    assert family.living() == sorted([parent.pid, child])
    if parent_dies_first:
        parent.kill()
        parent.wait()
        assert family.living() == [child]
        os.kill(child, signal.SIGKILL)
    else:
        assert guardian.sweep(run_id, grace=0.5) == []
    processes.wait_until(lambda: not processes.is_alive(child))


def guard(run_id: str, driver: int, temp: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", guardian.__file__, run_id, str(driver), str(temp)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def test_a_closed_pipe_ends_the_run_and_its_directory(spawn: Callable[..., Any], run_id: str, tmp_path: Path) -> None:
    temp = tmp_path / "ray"
    (temp / "session" / "logs").mkdir(parents=True)
    process, _ = spawn(command=("sleep", "60"))
    stranger, _ = spawn(marked=False, command=("sleep", "60"))
    watcher = guard(run_id, os.getpid(), temp)
    try:
        time.sleep(0.3)
        assert processes.is_alive(process.pid), "it waits while the pipe is open"
        assert watcher.stdin is not None
        watcher.stdin.close()
        assert watcher.wait(10) == 0
    finally:
        watcher.kill()
        watcher.wait()
    assert process.wait(1) == -signal.SIGTERM
    assert not temp.exists()
    assert processes.is_alive(stranger.pid)


def test_signals_of_the_terminal_do_not_end_the_guardian(
    spawn: Callable[..., Any], run_id: str, tmp_path: Path
) -> None:
    process, _ = spawn(command=("sleep", "60"))
    watcher = guard(run_id, os.getpid(), tmp_path / "none")
    try:
        assert processes.wait_until(lambda: _ignores(watcher.pid, signal.SIGTERM))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(watcher.pid, number)
        assert watcher.stdin is not None
        watcher.stdin.close()
        assert watcher.wait(10) == 0
    finally:
        watcher.kill()
        watcher.wait()
    assert process.wait(1) == -signal.SIGTERM


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (number - 1) & 1)


DRIVER = """
import os, subprocess, sys, time
guardian, run_id, temp, parent, stubborn = sys.argv[1:]
os.mkdir(temp)
watcher = subprocess.Popen(
    [sys.executable, "-S", guardian, run_id, str(os.getpid()), temp], stdin=subprocess.PIPE, start_new_session=True
)
env = {**os.environ, "ALIGN_RUN_ID": run_id}
first = subprocess.Popen([sys.executable, "-S", "-c", parent], env=env, stdout=subprocess.PIPE, text=True)
grandchild = first.stdout.readline().strip()
second = subprocess.Popen(
    [sys.executable, "-S", "-c", stubborn], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
)
second.stdout.readline()
print(first.pid, grandchild, second.pid, watcher.pid, flush=True)
time.sleep(60)
"""


def test_nothing_outlives_a_killed_driver(spawn: Callable[..., Any], run_id: str, tmp_path: Path) -> None:
    """A child, a grandchild in a session of its own, and one that ignores SIGTERM."""
    temp = tmp_path / "ray"
    stranger, _ = spawn(marked=False, command=("sleep", "60"))
    command = [sys.executable, "-S", "-c", DRIVER, guardian.__file__, run_id, str(temp)]
    driver = subprocess.Popen([*command, processes.PARENT, processes.STUBBORN], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(processes.is_alive, pids))
    driver.kill()
    driver.wait()
    killed = time.monotonic()
    gone = processes.wait_until(lambda: not any(map(processes.is_alive, pids)), guardian.GRACE_SECONDS + 5)
    assert gone, f"left: {[pid for pid in pids if processes.is_alive(pid)]}"
    assert time.monotonic() - killed < guardian.GRACE_SECONDS + 2, "the time that is stated"
    assert not temp.exists()
    assert processes.is_alive(stranger.pid)


def test_the_guardian_needs_nothing_of_this_project(tmp_path: Path, run_id: str) -> None:
    copy = tmp_path / "copy.py"
    copy.write_text(Path(guardian.__file__).read_text())
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(copy), run_id, "1", str(tmp_path / "none")],
        stdin=subprocess.DEVNULL,
        timeout=20,
    )
    assert done.returncode == 0


def test_the_guardian_knows_who_lost_the_mark_before_their_parent_ends(
    spawn: Callable[..., Any], run_id: str, tmp_path: Path
) -> None:
    """When the driver is killed, so is Ray's raylet, by the kernel; its agents are alone when the guardian wakes."""
    parent, line = spawn(
        "import subprocess, time; child = subprocess.Popen(['sleep', '60'], env={}); print(child.pid, flush=True); "
        "time.sleep(60)"
    )
    command = [sys.executable, "-S", guardian.__file__, run_id, str(os.getpid()), str(tmp_path / "none")]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert watcher.stdin is not None
    try:
        time.sleep(2 * guardian._WATCH_SECONDS + 1)
        parent.kill()
        parent.wait()
        assert processes.is_alive(int(line))
        watcher.stdin.close()
        assert watcher.wait(20) == 0
        assert not processes.is_alive(int(line))
    finally:
        watcher.kill()
        watcher.wait()
        if processes.is_alive(int(line)):
            os.kill(int(line), signal.SIGKILL)
