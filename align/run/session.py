"""The engines of a run, from launch to close: each stage runs on all sides at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from adapters.base import SIDES, Generation, Request, RunResult
from adapters.probe.spec import CaptureSpec
from align.case.schema import Case
from align.models.info import ModelInfo
from align.run.cluster import Cluster
from align.run.outcome import Outcome, SideOutcome
from align.run.plan import SideExtras, engine_spec, forced_along
from align.run.side import Aborted, Limits, Side
from align.run.transport import Hosts
from envs.profiles import Interpreter

_POLL_SECONDS = 0.2


class Watcher(Protocol):
    """Hears what each side is doing; called from several threads."""

    def update(self, role: str, stage: str, detail: str) -> None: ...


class Session:
    """Runs a case on one or two interpreters. A context manager: leaving it ends everything that was started.

    Args:
        interpreters: by role; the roles are the sides.
        directory: the run's directory; each side gets one of its own below it.
        extras: by role, what one side alone is asked for.
        hosts: where the engines run; the Ray cluster of this run if nothing is given.
        directories: by role, instead of a directory below ``directory``.
        audit: whether the workers record every index of the cache.
        fa: whether they record the arguments of attention and cache operators.
    """

    def __init__(
        self,
        case: Case,
        info: ModelInfo,
        interpreters: Mapping[str, Interpreter],
        directory: Path,
        limits: Limits,
        watcher: Watcher,
        extras: Mapping[str, SideExtras] | None = None,
        hosts: Hosts | None = None,
        directories: Mapping[str, Path] | None = None,
        audit: bool = True,
        fa: bool = True,
    ) -> None:
        self._case, self._info, self._interpreters = case, info, interpreters
        self._limits, self._watcher, self._extras = limits, watcher, extras or {}
        self._audit, self._fa = audit, fa
        self.roles = tuple(role for role in SIDES if role in interpreters)
        self.directories = {role: directory / role for role in self.roles} | dict(directories or {})
        self._requests = case.to_requests(info.eos_ids)
        self._abort = threading.Event()
        self._hosts = Cluster() if hosts is None else hosts
        self._sides: dict[str, Side] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(self.roles), thread_name_prefix="align-side")
        #: Other names for the stages that a host reports, while the driver knows better.
        self._names: dict[str, str] = {}
        self._closing = False
        self.outcome = Outcome(
            {
                role: SideOutcome(interpreters[role].engine, extras=self._extras.get(role, SideExtras()))
                for role in self.roles
            }
        )

    def __enter__(self) -> Session:
        for role in self.roles:
            self._watcher.update(role, "wait", f"for {self._hosts.waits_for}")
        self._hosts.__enter__()
        try:
            for role in self.roles:
                self._sides[role] = Side(
                    self._hosts,
                    role,
                    self._interpreters[role],
                    self.directories[role],
                    self._limits,
                    partial(self._heard, role),
                    self._abort,
                )
        except BaseException:
            self._hosts.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._abort.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is None:
            self._abort.clear()
            self._closing = True
            for side in self._sides.values():
                side.close()
        self._hosts.close()

    @property
    def abort(self) -> threading.Event:
        """Set, it stops all waiting for the sides."""
        return self._abort

    def side(self, role: str) -> Side:
        """One side, for calls beyond the stages below."""
        return self._sides[role]

    def _heard(self, role: str, stage: str, detail: str) -> None:
        if self._closing:  # what a host reported last is not what it does now
            stage, detail = "close", ""
        self._watcher.update(role, self._names.get(stage, stage), detail)

    def say(self, stage: str, detail: str = "") -> None:
        """Tell the watcher what the driver does for all sides."""
        for role in self.roles:
            self._watcher.update(role, stage, detail)

    # ------------------------------------------------------------------------------------------------------ stages

    def launch(self) -> None:
        """Build the engines and read their settings back.

        Raises:
            SideError: of the side that failed first; the other is stopped.
        """

        def start(role: str) -> None:
            side, outcome = self._sides[role], self.outcome.sides[role]
            outcome.spec = engine_spec(
                self._case.at(role),
                self._info,
                engine=side.engine,
                role=role,
                device=self._interpreters[role].device,
                work_dir=side.directory,
                extras=self._extras.get(role, SideExtras()),
                audit=self._audit,
                fa=self._fa,
            )
            outcome.launched = side.launch(outcome.spec)
            outcome.observations = side.observe()

        self._each(start)

    def observe(self) -> None:
        """Read the settings again: some are known only after the engine has worked."""

        def look(role: str) -> None:
            self.outcome.sides[role].observations = self._sides[role].observe()

        self._each(look)

    def observe_again(self, role: str) -> None:
        """Read one side's settings after a stage failed.

        Raises:
            SideError: it does not answer any more.
        """
        self._abort.clear()
        self.outcome.sides[role].observations = self._sides[role].observe()

    def generate(self) -> None:
        """Free-running greedy generation."""

        def run(role: str) -> None:
            self.outcome.sides[role].free = self._sides[role].generate(self._requests, self._case.decoding.top_logprobs)

        self._each(run)

    def generate_again(self) -> None:
        """The same once more, in the same engines."""

        def run(role: str) -> None:
            top_k = self._case.decoding.top_logprobs
            self.outcome.sides[role].again = self._sides[role].generate(self._requests, top_k)

        self._each(run, {"generate": "generate again"})

    def generate_fresh(self, roles: Collection[str]) -> None:
        """The free generation once more, of some sides, each in an engine of its own that ends afterwards.

        Raises:
            SideError: such an engine failed.
        """

        def run(role: str) -> None:
            if role not in roles:
                return
            outcome, directory = self.outcome.sides[role], self.directories[role].with_name(f"{role}-fresh")
            assert outcome.spec is not None, "launch() comes first"
            heard = partial(self._heard, role)
            side = Side(self._hosts, role, self._interpreters[role], directory, self._limits, heard, self._abort)
            try:
                side.launch(replace(outcome.spec, work_dir=str(directory)))
                outcome.fresh = side.generate(self._requests, self._case.decoding.top_logprobs)
            finally:
                side.close()

        self._each(run, {"generate": "generate in a fresh engine"})

    def replay(
        self,
        along: tuple[Generation, ...] | None = None,
        captures: Mapping[str, CaptureSpec] | None = None,
        only: str = "",
    ) -> None:
        """Teacher-forced generation of all sides along the same ids.

        Args:
            along: whose ids; by default what the reference generated.
            captures: by role, what is recorded meanwhile.
            only: the side that runs; the other one keeps what it did. By default both.
        """
        forced = self.forced(along)
        wanted = captures or {}

        def run(role: str) -> None:
            if only and role != only:
                return
            side = self.outcome.sides[role]
            capture = wanted.get(role)
            side.replay = self._sides[role].replay(forced, self._case.decoding.top_logprobs, capture)
            if capture is not None:
                side.captures.append(capture)

        self._each(run, {"replay": "replay routing" if only else "record"} if wanted else {})

    def replay_some(
        self, only: Collection[str], along: tuple[Generation, ...] | None, captures: Mapping[str, CaptureSpec]
    ) -> dict[str, RunResult]:
        """The same of some requests by themselves, recorded; the outcome stays that of the whole batch.

        Args:
            only: names of the requests.
        """
        forced, results = self.forced(along, only), dict[str, RunResult]()

        def run(role: str) -> None:
            results[role] = self._sides[role].replay(forced, self._case.decoding.top_logprobs, captures[role])

        self._each(run, {"replay": "record alone"})
        return results

    def replay_apart(
        self, captures: Mapping[str, CaptureSpec], along: tuple[Generation, ...] | None = None
    ) -> dict[str, RunResult]:
        """Replay some sides once more for records of their own; the outcome of the run stays as it is.

        Args:
            captures: by role, of the sides that replay.
            along: as in :meth:`replay`.
        """
        forced = self.forced(along)
        found: dict[str, RunResult] = {}

        def run(role: str) -> None:
            if role in captures:
                found[role] = self._sides[role].replay(forced, self._case.decoding.top_logprobs, captures[role])

        self._each(run, {"replay": "confirm"})
        return found

    def forced(self, along: tuple[Generation, ...] | None = None, only: Collection[str] = ()) -> tuple[Request, ...]:
        """The requests with the ids that a replay follows; of ``only`` some, the first ones arrive at once."""
        if along is None:
            reference = self.outcome.sides["reference"].free
            assert reference is not None, "generate() comes first"
            along = reference.generations
        forced = forced_along(self._requests, along)
        if not only:
            return forced
        chosen = [request for request in forced if request.name in only]
        first = min(request.arrival for request in chosen)
        return tuple(replace(request, arrival=request.arrival - first) for request in chosen)

    def _each(self, work: Callable[[str], None], names: Mapping[str, str] | None = None) -> None:
        """Run ``work`` for all roles at once; the first failure stops the others."""
        self._names = dict(names or {})
        futures: dict[Future[None], str] = {self._pool.submit(work, role): role for role in self.roles}
        pending = set(futures)
        # Short waits, so that Ctrl-C and signals reach this thread.
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            failures = [future.exception() for future in done if future.exception() is not None]
            real = [error for error in failures if not isinstance(error, Aborted)]
            if real:
                self._abort.set()
                wait(pending)
                assert real[0] is not None
                raise real[0]
