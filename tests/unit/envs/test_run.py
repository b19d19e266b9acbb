"""Running a command: log, tail, signs of life, and that nothing survives."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from envs import run


def _python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def _no_beat(seconds: float, line: str) -> None:
    return None


def test_output_goes_to_the_log_and_noise_stays_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; print('WARNING: x'); print('Collecting y'); print('bad', file=sys.stderr); sys.exit(3)"
    outcome = run.run(_python(code), env=os.environ, log=log, beat=_no_beat, keep_fds=())
    assert outcome == run.Outcome(3, ("Collecting y", "bad"))
    written = log.read_text()
    assert written.startswith("$ ")
    assert "WARNING: x\n" in written


def test_heartbeat_carries_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HEARTBEAT_S", 0.2)
    beats: list[tuple[float, str]] = []
    code = "import time; print('Downloading z'); time.sleep(1.2)"
    run.run(
        _python(code),
        env=os.environ,
        log=tmp_path / "log",
        beat=lambda seconds, line: beats.append((seconds, line)),
        keep_fds=(),
    )
    assert len(beats) >= 2
    assert beats[-1][1] == "Downloading z"
    assert [seconds for seconds, _ in beats] == sorted(seconds for seconds, _ in beats)


def test_kill_all_ends_the_command_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcomes: list[run.Outcome] = []

    def target() -> None:
        outcomes.append(run.run(_python(code), env=os.environ, log=tmp_path / "log", beat=_no_beat, keep_fds=()))

    thread = threading.Thread(target=target)
    thread.start()
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill_all()
    thread.join(timeout=10)
    assert outcomes[0].code == -9
    pid = int(pid_file.read_text())
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")
