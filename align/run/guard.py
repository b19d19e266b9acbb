"""The driver's half of the clean-up: the guardian process, a temporary directory, and orphans collected."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from align.errors import UserError
from align.run import guardian

#: Unix socket paths end at 107 characters, and Ray appends about 60 to its directory.
_MAX_TEMP_DIR = 45
_GUARDIAN_SECONDS = 10.0
_REAP_SECONDS = 2.0
#: prctl(2): orphaned descendants become children of this process.
_PR_SET_CHILD_SUBREAPER = 36


def _adopt_orphans() -> None:
    """Workers whose parent has ended would otherwise stay as zombies where process 1 collects none (containers)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Collect what was adopted. All of it has been ended, so this takes a moment at most."""
    deadline = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


class Guard:
    """Starts the guardian of one run and a temporary directory that goes with it.

    Args:
        run_id: mark in the environment of every process that must not outlive the run.

    Raises:
        UserError: no temporary directory can be made.
    """

    def __init__(self, run_id: str) -> None:
        try:
            self.temp_dir = tempfile.mkdtemp(prefix="align-")
            if len(self.temp_dir) > _MAX_TEMP_DIR:
                os.rmdir(self.temp_dir)
                self.temp_dir = tempfile.mkdtemp(prefix="align-", dir="/tmp")
        except OSError as error:
            raise UserError(
                f"no temporary directory can be made: {error.strerror or error}",
                "free some space there, or name another directory: TMPDIR=/path",
            ) from error
        self._run_id = run_id
        _adopt_orphans()
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(Path(guardian.__file__)), run_id, str(os.getpid()), self.temp_dir],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let the guardian end what is left, and wait for it; do its work if it was killed itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(timeout=_GUARDIAN_SECONDS) < 0:
                guardian.sweep(self._run_id, but=frozenset({os.getpid()}))
                shutil.rmtree(self.temp_dir, ignore_errors=True)
        _reap()
