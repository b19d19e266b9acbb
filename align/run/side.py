"""One side of a comparison, seen from the driver: its host, its directory, and the watch over it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from adapters import probe
from adapters.base import EngineSpec, Observation, Request, RunResult, split_options
from adapters.host import Failure, Launched
from adapters.mistakes import Mistake, read_mistake
from adapters.probe.births import Fall, announced, read_falls
from adapters.probe.spec import CaptureSpec
from adapters.probe.step_reader import read_dummies
from align.collectives.record.files import FOLDER as COLLECTIVES
from align.collectives.record.mismatch import read_mismatch
from align.errors import SideError, UserError
from align.layout import Layout, expert_rules
from align.run import guardian
from align.run.collectives import RanksPart
from align.run.directory import disk_error
from align.run.groups import GroupHost
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
        # What the user sets there must be in actors too, which an engine starts with the host's first environment.
        options = split_options(spec.options).env
        env = {
            **self._interpreter.env,
            **{name: value for name, value in options.items() if value is not None},
            "PYTHONPATH": os.pathsep.join([*self._interpreter.pythonpath, str(probe.PATH)]),
            "ALIGN_PROBE_DIR": str(self.directory),
        }
        env = {name: value for name, value in env.items() if options.get(name, "") is not None}
        try:
            python, engine, directory = self._interpreter.python, self.engine, self.directory
            hosts = [self._hosts.start(python, env, engine, directory) for _ in range(spec.dp)]
        except HostDied as error:
            raise self._failed(f"did not start: {error}") from error
        self._host = hosts[0] if spec.dp == 1 else GroupHost(hosts)
        if spec.dp > 1:
            spec = replace(spec, master_port=_free_port())
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
            (self._dealt(requests), top_k, *more),
            lambda: log.idle_seconds() > self.limits.step,
            f"made no step for {self.limits.step:.0f} s while it was to {method}",
            detail=log.text,
        )
        return self._in_order(result, requests)

    def _in_order(self, result: RunResult, requests: Sequence[Request]) -> RunResult:
        """As the requests were given; with what the groups computed without requests, which is known when all ended."""
        if self._spec is None or self._spec.dp == 1:
            return result
        found = {generation.request: generation for generation in result.generations}
        return replace(
            result,
            generations=tuple(found[request.name] for request in requests),
            dummies=read_dummies(self.directory, result.run),
        )

    def _dealt(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """The requests of a case with more data-parallel groups than this side has are dealt to those it has."""
        groups = 1 if self._spec is None else self._spec.dp
        return tuple(one if one.dp_rank < groups else replace(one, dp_rank=one.dp_rank % groups) for one in requests)

    def repatch(self, files: Sequence[str]) -> None:
        """Put other patches in the place of those that the engine was launched with.

        Raises:
            SideError: a patch fails, or the engine does with it.
        """
        assert self._spec is not None, "launch() comes first"
        deadline = time.monotonic() + self.limits.step
        self._call("repatch", (tuple(files),), lambda: time.monotonic() > deadline, "did not take the patches")
        self._spec = replace(self._spec, patches=tuple(files))

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
        known = [] if self.launched is None else [self.launched.pid, *self.launched.workers]
        for pid in {*known, *announced(self.directory).values()}:
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
                self._refuse_parted(method)
                mistake = read_mistake(self.directory)
                if mistake is not None:
                    raise self._mistaken(method, mistake) from error
                self._require_none_fell()
                raise self._failed(said("stopped.died", method=method, what=raw(str(error)))) from error
            self._report(detail)
            if self._abort.is_set():
                raise Aborted
            # The engine may wait for ever for the worker that found it.
            mistake = None if method == "close" else read_mistake(self.directory)
            if mistake is not None:
                self.kill()
                raise self._mistaken(method, mistake)
            if method != "close":
                self._refuse_parted(method)
                self._require_workers(method)
            if expired():
                self.kill()
                raise self._failed(complaint)
        self._report(detail)
        if isinstance(answer, Failure):
            self._refuse_parted(method)
            mistake = Mistake(answer.message, answer.hint) if answer.hint else read_mistake(self.directory)
            if mistake is not None:
                raise self._mistaken(method, mistake)
            self._require_none_fell()
            raise self._failed(
                said("stopped.failed", method=method, what=raw(f"{answer.kind}: {answer.message.strip()}"))
            )
        return answer

    def _refuse_parted(self, method: str) -> None:
        """End the side if its ranks do not make the same collective: the others wait for one that never comes.

        Raises:
            RanksPart: they do not.
        """
        parted = read_mismatch(self.directory / COLLECTIVES)
        if parted is not None:
            self.kill()
            raise RanksPart(self.role, self.engine, method, parted)

    def _require_workers(self, method: str) -> None:
        """Some engines wait for ever for a worker that is gone although the host lives.

        Raises:
            SideError: a worker could not go on, or is gone; the side is killed.
        """
        self._require_none_fell()
        for rank, pid in announced(self.directory).items():
            if _is_gone(pid):
                self.kill()
                raise self._failed(said("stopped.lost_rank", rank=rank, pid=pid, method=method))
        workers = () if self.launched is None else self.launched.workers
        dead = next((pid for pid in workers if _is_gone(pid)), None)
        if dead is not None:
            self.kill()
            raise self._failed(said("stopped.lost", pid=dead, method=method))

    def _require_none_fell(self) -> None:
        for fall in read_falls(self.directory):
            self.kill()
            raise self._fallen(fall)

    def _fallen(self, fall: Fall) -> SideError:
        """With the traceback of the worker itself; the log's end is of whoever waited for it."""
        error = self._failed(said(f"stopped.fallen_{fall.during}", rank=fall.rank, what=raw(fall.error)))
        tail = tuple(line for line in fall.traceback.splitlines() if line.strip())[-_LOG_LINES:]
        return SideError(error.side, error.message, error.hint, tail, error.told)

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
        asked = self._spec
        rules = () if asked is None else expert_rules(self.engine, Layout(asked.tp, asked.dp, asked.ep))
        demands = f"; {self.engine} demands of such a layout: {'; '.join(rules)}" if rules else ""
        if not given:
            return f"read its log, {log}; then run the same command again{demands}"
        return f"leave out {' '.join(given)}, which this side alone ran with, or correct it; its log is {log}{demands}"


def _free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        return int(probed.getsockname()[1])


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent, which waits for an answer, may not have collected it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


class _Growth:
    """Whether a rank's step log grows, and how far the furthest is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes = self._look()
        self._since = time.monotonic()
        self._steps: Counter[Path] = Counter()

    def _look(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._directory.glob("steps-rank*.jsonl")}

    def idle_seconds(self) -> float:
        sizes = self._look()
        if sizes != self._sizes:
            for path, size in sizes.items():
                with path.open("rb") as log:
                    before = self._sizes.get(path, 0)
                    log.seek(before)
                    self._steps[path] += log.read(size - before).count(b'"event": "step"')
            self._sizes, self._since = sizes, time.monotonic()
        return time.monotonic() - self._since

    def text(self) -> str:
        self.idle_seconds()
        return f"step {max(self._steps.values(), default=0)}"
