"""One comparison from launch to tokens: both sides at once, then free generation, then a replay where it helps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from adapters.base import SIDES, EngineSpec, Observation, Request, RunResult
from adapters.host import ADAPTERS, Launched
from align.case.capacity import capacity
from align.case.schema import Case, Numerics
from align.errors import UserError
from align.models.info import ModelInfo
from align.models.shapes import DENSE, architecture, check_shapes
from align.run.cluster import Cluster
from align.run.side import Aborted, Limits, Side
from envs.profiles import Interpreter

T = TypeVar("T")
#: The device whose operators are ours.
SIMULATED = "simnpu"
#: vLLM refuses smaller blocks, and others than powers of two.
MIN_BLOCK = 16
_POLL_SECONDS = 0.2


class Watcher(Protocol):
    """Hears what each side is doing; called from several threads."""

    def update(self, role: str, stage: str, detail: str) -> None: ...


@dataclass
class SideOutcome:
    """What is known of one side; ``None`` where it did not get that far."""

    engine: str
    launched: Launched | None = None
    observations: list[Observation] = field(default_factory=list)
    free: RunResult | None = None
    replay: RunResult | None = None


@dataclass
class Outcome:
    """Both sides of a run, by role."""

    sides: dict[str, SideOutcome]


def check_launchable(case: Case) -> None:
    """Refuse what no adapter launches yet, before anything is started.

    Raises:
        UserError: an engine that is no side, or a layout with data or expert parallelism.
    """
    for role, engine in zip(SIDES, (case.candidate, case.reference), strict=True):
        if engine not in ADAPTERS:
            raise UserError(
                f"the case's {role} is {engine}, which is not launched as a side",
                f"name one of {', '.join(ADAPTERS)} as {role} in the case file",
            )
    layout = case.layout
    if layout.dp != 1 or layout.ep != 1:
        raise UserError(
            f"layout tp{layout.tp} dp{layout.dp} ep{layout.ep} is not launched by this version",
            "use dp 1 and ep 1; tensor parallelism (tp) works on both engines",
        )
    block = case.batch.block_size
    if block < MIN_BLOCK or block & (block - 1):
        raise UserError(
            f"block_size {block} is not one that both engines take",
            f"use a power of two from {MIN_BLOCK} on, such as 64 or 128",
        )


def check_device(case: Case, info: ModelInfo, device: str) -> None:
    """Refuse what the device cannot run, before anything is started.

    Raises:
        UserError: a model whose operators are not simulated, or numerics asked of hardware.
    """
    if device != SIMULATED:
        if case.numerics != Numerics():
            raise UserError(
                f"the case asks for numerics of the simulated NPU, and the device is {device}",
                "leave --numerics out, or remove numerics from the case file",
            )
        return
    if architecture(info) not in DENSE:
        raise UserError(
            f"{info.name} is a {architecture(info)}; the operators of {', '.join(DENSE)} are simulated",
            "choose a dense model, or a device that has the others: DEVICE=ascend",
        )
    quantised = info.config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{info.name} is quantised ({method}), and quantised operators are not simulated",
            "choose the model in bfloat16 or float16, or DEVICE=ascend",
        )
    check_shapes(info)


def engine_spec(case: Case, info: ModelInfo, *, engine: str, role: str, device: str, work_dir: Path) -> EngineSpec:
    """What one engine is asked for. Both engines get the same numbers.

    Room is made for exactly this case, so that neither engine splits a prefill, preempts, or has memory to reuse that
    the other does not have.
    """
    need = capacity(case)
    block = case.batch.block_size
    return EngineSpec(
        engine=engine,
        side=role,
        model_path=str(info.path),
        dtype=case.dtype,
        work_dir=str(work_dir),
        tp=case.layout.tp,
        dp=case.layout.dp,
        ep=case.layout.ep,
        block_size=block,
        max_model_len=-(-need.max_model_len // block) * block,
        max_batch=need.max_batch,
        # One token more than the prompts: lmdeploy splits a prefill that reaches its limit.
        max_prefill_tokens=-(-(need.max_prefill_tokens + 1) // block) * block,
        num_blocks=need.num_blocks,
        hold_arrivals=case.batch.together,
        device=device,
    )


def forced_along(requests: tuple[Request, ...], result: RunResult) -> tuple[Request, ...]:
    """The same requests, teacher-forced along what ``result`` generated."""
    ids = {generation.request: generation.token_ids for generation in result.generations}
    return tuple(
        replace(request, forced=ids[request.name], max_new_tokens=len(ids[request.name]), stop_ids=())
        for request in requests
    )


class Session:
    """Runs a case on two interpreters. Use as a context manager: leaving it ends everything that was started.

    Args:
        interpreters: by role.
        directory: the run's directory; each side gets one of its own below it.
    """

    def __init__(
        self,
        case: Case,
        info: ModelInfo,
        interpreters: Mapping[str, Interpreter],
        directory: Path,
        limits: Limits,
        watcher: Watcher,
    ) -> None:
        self._case, self._info, self._interpreters = case, info, interpreters
        self._directory, self._limits, self._watcher = directory, limits, watcher
        self._requests = case.to_requests(info.eos_ids)
        self._abort = threading.Event()
        self._cluster = Cluster()
        self._sides: dict[str, Side] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(SIDES), thread_name_prefix="align-side")
        self.outcome = Outcome({role: SideOutcome(interpreters[role].engine) for role in SIDES})

    def __enter__(self) -> Session:
        for role in SIDES:
            self._watcher.update(role, "wait", "for Ray")
        self._cluster.__enter__()
        try:
            for role in SIDES:
                self._sides[role] = Side(
                    self._cluster,
                    role,
                    self._interpreters[role],
                    self._directory / role,
                    self._limits,
                    lambda stage, detail, role=role: self._watcher.update(role, stage, detail),  # type: ignore[misc]
                    self._abort,
                )
        except BaseException:
            self._cluster.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._abort.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is None:
            self._abort.clear()
            for side in self._sides.values():
                side.close()
        self._cluster.close()

    def side(self, role: str) -> Side:
        """One side, for calls beyond the stages below."""
        return self._sides[role]

    # ------------------------------------------------------------------------------------------------------ stages

    def launch(self) -> None:
        """Build both engines and read their settings back.

        Raises:
            SideError: of the side that failed first; the other is stopped.
        """

        def start(role: str) -> None:
            side = self._sides[role]
            spec = engine_spec(
                self._case,
                self._info,
                engine=side.engine,
                role=role,
                device=self._interpreters[role].device,
                work_dir=side.directory,
            )
            self.outcome.sides[role].launched = side.launch(spec)
            self.outcome.sides[role].observations = side.observe()

        self._both(start)

    def generate(self) -> None:
        """Free-running greedy generation on both sides."""

        def run(role: str) -> None:
            self.outcome.sides[role].free = self._sides[role].generate(self._requests, self._case.decoding.top_logprobs)

        self._both(run)

    def replay(self) -> None:
        """Teacher-forced generation on both sides, along the reference's greedy ids."""
        reference = self.outcome.sides["reference"].free
        assert reference is not None, "generate() comes first"
        forced = forced_along(self._requests, reference)

        def run(role: str) -> None:
            self.outcome.sides[role].replay = self._sides[role].replay(forced, self._case.decoding.top_logprobs)

        self._both(run)

    def _both(self, work: Callable[[str], None]) -> None:
        """Run ``work`` for both roles at once; the first failure stops the other."""
        futures: dict[Future[None], str] = {self._pool.submit(work, role): role for role in SIDES}
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
