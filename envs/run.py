"""Running one long command quietly: complete output to a log, a sign of life to the user."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Called from time to time with the seconds since the start and the last line of output.
Beat = Callable[[float, str], None]

#: Seconds between two signs of life.
HEARTBEAT_S = 10.0

_TAIL_LINES = 40
_NOISE = ("WARNING:", "DEPRECATION:", "[notice]", "  warn", "Looking in ")

_live: set[subprocess.Popen[str]] = set()
_live_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (negative: signal) and its last lines, oldest first."""

    code: int
    tail: tuple[str, ...]


class Runner(Protocol):
    """Runs one command to its end; tests put their own in place."""

    def __call__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, beat: Beat, keep_fds: tuple[int, ...]
    ) -> Outcome:
        """Run ``argv`` with the descriptors ``keep_fds`` open, so that a lock outlives a killed builder."""
        ...


def is_noise(line: str) -> bool:
    """Tell whether a line of pip's output says nothing to a user (warnings, notices, blanks)."""
    return not line.strip() or line.startswith(_NOISE)


def run(argv: Sequence[str], *, env: Mapping[str, str], log: Path, beat: Beat, keep_fds: tuple[int, ...]) -> Outcome:
    """Run ``argv``, append all it prints to ``log`` and call ``beat`` every :data:`HEARTBEAT_S` seconds."""
    start = time.monotonic()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    failure: list[OSError] = []
    with open(log, "a", encoding="utf-8") as sink:
        sink.write(f"$ {' '.join(argv)}\n")
        sink.flush()
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            pass_fds=keep_fds,
            # A group of its own, so that a stopped build takes pip's own children along.
            start_new_session=True,
        )
        with _live_lock:
            _live.add(process)

        def drain() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if not is_noise(line):
                    tail.append(line.rstrip())
                try:
                    sink.write(line)
                except OSError as error:  # a full disk must not block the command on a full pipe
                    failure.append(error)

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        try:
            while True:
                try:
                    process.wait(timeout=HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    beat(time.monotonic() - start, tail[-1] if tail else "")
            reader.join(timeout=5.0)
        except BaseException:
            kill(process)
            raise
        finally:
            with _live_lock:
                _live.discard(process)
    if failure:
        raise failure[0]
    return Outcome(process.returncode, tuple(tail))


def kill(process: subprocess.Popen[str]) -> None:
    """End a command and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_all() -> None:
    """End every command that :func:`run` is waiting for, in whatever thread."""
    with _live_lock:
        processes = list(_live)
    for process in processes:
        kill(process)
