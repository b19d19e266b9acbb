"""Real small processes for tests that end some."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from align.run import guardian

#: Ignores SIGTERM and says when it does.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
#: Starts a child in a session of its own, says its number, and sleeps.
PARENT = (
    "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60'], start_new_session=True); "
    "print(child.pid, flush=True); time.sleep(60)"
)


def marked_environment(run_id: str) -> dict[str, str]:
    return {**os.environ, guardian.MARK: run_id}


def start(*command: str, run_id: str | None = None) -> subprocess.Popen[str]:
    """A process with the mark of a run, or without any."""
    env = dict(os.environ) if run_id is None else marked_environment(run_id)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def python(script: str, run_id: str | None = None) -> tuple[subprocess.Popen[str], str]:
    """A Python process and the first line it says."""
    process = start(sys.executable, "-S", "-c", script, run_id=run_id)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def is_alive(pid: int) -> bool:
    """Zombies hold nothing and do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return true()
