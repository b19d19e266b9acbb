"""One side of a comparison, seen from the driver: its host, its directory, and the watch over it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from adapters import probe
from adapters.base import EngineSpec, Observation, Request, RunResult
from adapters.host import Failure, Launched
from adapters.mistakes import Mistake, read_mistake
from adapters.probe.spec import CaptureSpec
from align.errors import SideError, UserError
from align.run import guardian
from align.run.directory import disk_error
from align.run.plan import own_changes
from align.run.transport import Host, HostDied, Hosts
from align.sentences import Said, raw, said, text_of
from align.sentences import told as told_of
from envs.profiles import Interpreter

_POLL_SECONDS = 0.2
_LOG_LINES = 12
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Bounds of the watchdog, in seconds.

    Attributes:
        launch: from the host's start until the engine takes requests.
        step: longest time without a new engine step while generating.
        close: for a polite end; afterwards the side is killed.
    """

    launch: float = 600.0
    step: float = 180.0
    close: float = 15.0


class Aborted(Exception):  # noqa: N818 - the other side's error is the error
    """The other side failed, so this one stopped waiting."""


class Side:
    """An engine in its host.

    Args:
        hosts: starts the host and ends it with the run.
        role: ``candidate`` or ``reference``.
        on_progress: called with ``(stage, detail)`` whenever either changes.
        abort: set by whoever wants all waiting to stop.
    """

    def __init__(
        self,
        hosts: Hosts,
        role: str,
        interpreter: Interpreter,
        directory: Path,
        limits: Limits,
        on_progress: Callable[[str, str], None],
        abort: threading.Event,
    ) -> None:
        self.role, self.engine = role, interpreter.engine
        self.directory, self.limits = directory, limits
        self._hosts, self._interpreter = hosts, interpreter
        self._on_progress, self._abort = on_progress, abort
        self._host: Host | None = None
        self.launched: Launched | None = None
        self._spec: EngineSpec | None = None
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise disk_error(error, directory) from error

    # ------------------------------------------------------------------------------------------------- operations

    def launch(self, spec: EngineSpec) -> Launched:
        """Start the host and build the engine."""
        self._spec = spec
        env = {
            **self._interpreter.env,
            "PYTHONPATH": os.pathsep.join([*self._interpreter.pythonpath, str(probe.PATH)]),
            "ALIGN_PROBE_DIR": str(self.directory),
        }
        try:
            self._host = self._hosts.start(self._interpreter.python, env, self.engine, self.directory)
        except HostDied as error:
            raise self._failed(f"did not start: {error}") from error
        deadline = time.monotonic() + self.limits.launch
        launched: Launched = self._call(
            "launch", (spec,), lambda: time.monotonic() > deadline, f"did not start within {self.limits.launch:.0f} s"
        )
        self.launched = launched
        return launched

    def observe(self) -> list[Observation]:
        deadline = time.monotonic() + self.limits.step
        seen: list[Observation] = self._call(
            "observe", (), lambda: time.monotonic() > deadline, "did not answer what it observes"
        )
        return seen

    def generate(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None) -> RunResult:
        """Generate greedily; with ``capture`` the workers record what it says."""
        return self._run("generate", requests, top_k, capture)

    def replay(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None) -> RunResult:
        """Generate along the requests' forced ids; with ``capture`` the workers record what it says."""
        return self._run("replay", requests, top_k, capture)

    def _run(self, method: str, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None) -> RunResult:
        log = _Growth(self.directory)
        # An adapter without a probe knows nothing of captures.
        more = () if capture is None else (capture,)
        result: RunResult = self._call(
            method,
            (tuple(requests), top_k, *more),
            lambda: log.idle_seconds() > self.limits.step,
            f"made no step for {self.limits.step:.0f} s while it was to {method}",
            detail=log.text,
        )
        return result

    def close(self) -> None:
        """End the engine politely; whatever remains is killed."""
        if self._host is None:
            return
        deadline = time.monotonic() + self.limits.close
        try:
            self._abort.clear()
            self._call("close", (), lambda: time.monotonic() > deadline, "did not close")
        except UserError:  # of the side, or of what carries it
            self.kill()
        self._host = None

    def kill(self) -> None:
        """End every process of this side at once: the host, and what its engine started."""
        pids = [] if self.launched is None else [self.launched.pid, *self.launched.workers]
        for pid in pids:
            if pid in guardian.marked(self._hosts.run_id):
                with contextlib.suppress(ProcessLookupError):  # it may end between the two lines
                    os.kill(pid, signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------------- waiting

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        expired: Callable[[], bool],
        complaint: str,
        detail: Callable[[], str] | None = None,
    ) -> Any:
        assert self._host is not None, f"{method} before launch"
        try:
            pending = self._host.call(method, *args)
        except HostDied as error:
            raise self._failed(f"died before {method}: {error}") from error
        while True:
            try:
                if pending.poll(_POLL_SECONDS):
                    answer = pending.result()
                    break
            except HostDied as error:
                mistake = read_mistake(self.directory)
                if mistake is not None:
                    raise self._mistaken(method, mistake) from error
                raise self._failed(said("stopped.died", method=method, what=raw(str(error)))) from error
            self._report(detail)
            if self._abort.is_set():
                raise Aborted
            # The engine may wait for ever for the worker that found it.
            mistake = None if method == "close" else read_mistake(self.directory)
            if mistake is not None:
                self.kill()
                raise self._mistaken(method, mistake)
            dead = None if method == "close" else self._dead_worker()
            if dead is not None:
                self.kill()
                raise self._failed(said("stopped.lost", pid=dead, method=method))
            if expired():
                self.kill()
                raise self._failed(complaint)
        self._report(detail)
        if isinstance(answer, Failure):
            mistake = Mistake(answer.message, answer.hint) if answer.hint else read_mistake(self.directory)
            if mistake is not None:
                raise self._mistaken(method, mistake)
            raise self._failed(
                said("stopped.failed", method=method, what=raw(f"{answer.kind}: {answer.message.strip()}"))
            )
        return answer

    def _dead_worker(self) -> int | None:
        """A worker that is gone although the host lives: some engines then wait for ever."""
        workers = () if self.launched is None else self.launched.workers
        return next((pid for pid in workers if _is_gone(pid)), None)

    def _report(self, detail: Callable[[], str] | None) -> None:
        try:
            progress = json.loads((self.directory / "progress.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._on_progress("start", "interpreter")
            return
        self._on_progress(progress["stage"], detail() if detail is not None else progress["detail"])

    def _mistaken(self, method: str, mistake: Mistake) -> SideError:
        """The user has to correct something; the log, whose end is our own stack then, would only hide it."""
        message = mistake.message.strip()
        return SideError(
            self.role,
            f"the {self.role} ({self.engine}) failed to {method}: {message}",
            mistake.hint,
            told=self._told(said("stopped.failed", method=method, what=raw(message))),
        )

    def _told(self, what: Said) -> Said:
        return said("stopped.side", side=self.role, engine=self.engine, what=what)

    def _failed(self, what: str | Said) -> SideError:
        sentence = self._told(told_of(what))
        what = what if isinstance(what, str) else text_of(what)
        log = self.directory / "engine.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        tail = tuple(line for line in lines if line.strip())[-_LOG_LINES:]
        told = f"the {self.role} ({self.engine}) {what}"
        disk = self._disk_hint(what)
        if disk:  # all is said, and the log ends with our own stack, or where the disk did
            return SideError(self.role, told, disk, told=sentence)
        return SideError(self.role, told, self._what_next(log), tail, sentence)

    def _disk_hint(self, what: str) -> str:
        """What to do if the disk is the cause; empty if it is not."""
        if os.strerror(errno.ENOSPC) in what or os.strerror(errno.EDQUOT) in what:
            return f"free disk space at {self.directory}, or choose --out elsewhere"
        denied = (os.strerror(errno.EROFS), os.strerror(errno.EACCES))
        if any(text in what for text in denied) and str(self.directory) in what:
            return f"make {self.directory} writable, or choose --out elsewhere"
        return ""

    def _what_next(self, log: Path) -> str:
        """What the user changed about this side is the first suspect."""
        given = [] if self._spec is None else own_changes(self._spec)
        if not given:
            return f"read its log, {log}; then run the same command again"
        return f"leave out {' '.join(given)}, which this side alone ran with, or correct it; its log is {log}"


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent, which waits for an answer, may not have collected it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


class _Growth:
    """Whether the engine's step log grows, and how far it is."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "steps-rank0.jsonl"
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._since = time.monotonic()
        self._steps = 0

    def idle_seconds(self) -> float:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            with self._path.open("rb") as log:
                log.seek(self._size)
                self._steps += log.read(size - self._size).count(b'"event": "step"')
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since

    def text(self) -> str:
        self.idle_seconds()
        return f"step {self._steps}"
