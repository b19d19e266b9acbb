"""Runs one case of a night: ``align run`` in a process of its own, which ends with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from align.errors import UserError
from align.history.night import Ended
from align.history.plan import Plan, PlannedCase
from align.report.read import read_result
from align.run.directory import RESULT

#: Seconds that a run has to end its engines, after it was asked to.
_ENDING = 90.0
_LOG_LINES = 3
# 1 is PR_SET_PDEATHSIG: a run whose night was killed ends as if it had been asked to (15 is SIGTERM).
_START = (
    "import ctypes, os, runpy, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(143); "
    "runpy.run_module('align', run_name='__main__', alter_sys=True)"
)


def run_case(plan: Plan, case: PlannedCase, directory: Path, device: str) -> Ended:
    """Run a case into a new directory, and read what it left.

    What it printed is beside the directory, in a file of the same name with ``.log``.
    """
    words = ("run", *case.arguments, "--device", device, "--quiet", "--out", str(directory))
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-c", _START, str(os.getpid()), *words]
    log = directory.with_name(f"{directory.name}.log")
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(command, cwd=plan.directory, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        late = _waited(child, 60 * plan.minutes)
    seconds = time.monotonic() - began
    if late:
        return Ended(directory, None, f"it took longer than {plan.minutes:g} minutes and was ended", seconds)
    if not (directory / RESULT).is_file():
        return Ended(directory, None, f"it ended with {child.returncode}: {_last(log)}", seconds)
    try:
        return Ended(directory, read_result(directory / RESULT), "", seconds)
    except UserError as error:
        return Ended(directory, None, error.message, seconds)


def _waited(child: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a run; whether it took too long. Whatever ends the wait ends the run, too."""
    try:
        child.wait(limit)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(_ENDING)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _last(log: Path) -> str:
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return " ".join(" ".join([line for line in lines if line.strip()][-_LOG_LINES:]).split()) or "it said nothing"
