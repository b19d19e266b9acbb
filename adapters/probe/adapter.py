"""What every probed engine does alike: a run is announced to the workers, executed, and read back from their logs."""

from __future__ import annotations

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from adapters.base import Adapter, EngineSpec, Generation, Observation, Progress, Request, RunResult, split_options
from adapters.mistakes import Mistake
from adapters.probe.launch import DP_RANK, write_launch
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, write_spec
from adapters.probe.step_reader import read_generations, read_steps, wait_for_ranks
from align.collectives.record.files import FOLDER as COLLECTIVES
from align.collectives.record.files import wait_for_calls
from align.ledger.record.files import FOLDER, write_run


def simulated_numerics() -> Observation:
    """Which numerics the simulated operators use in this process."""
    numerics = sys.modules.get("torch_npu._sim.numerics")
    if numerics is None:
        return Observation("numerics", None, "torch_npu", "the operators are not simulated")
    return Observation("numerics", numerics.numerics(), "torch_npu._sim.numerics")


def _cut_at_stop(generation: Generation, request: Request) -> Generation:
    """Without what an engine that looks ahead computed after the id that ended the request."""
    for index, step in enumerate(generation.steps):
        if step.chosen in request.stop_ids:
            return Generation(generation.request, generation.steps[: index + 1])
    return generation


def _require_same(generation: Generation, returned: Sequence[int]) -> None:
    """The engine must return what its workers chose; it may return less, without what ended the request.

    Raises:
        Mistake: it does not; names the request, the index and both ids.
    """
    chosen = generation.token_ids[: len(returned)]
    for index, (ours, theirs) in enumerate(zip_longest(chosen, returned)):
        if ours != theirs:
            there = "nothing" if ours is None else f"id {ours}"
            raise Mistake(
                f"request {generation.request}: the engine returned id {theirs} as generated token {index}, "
                f"and its workers chose {there} by their logits",
                "the sampler does not take the greedy choice: check the sampling options (--set) and what a patch "
                "replaces after the logits",
            )


class ProbedAdapter(Adapter):
    """An adapter whose workers carry the probe's hooks.

    A subclass says how its engine names requests and how it executes them.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._samples = False
        #: Global ranks of this engine, and the data-parallel group that they are.
        self._ranks, self._dp_rank = range(1), 0
        #: Arrivals of all requests of the run, those of other data-parallel groups too.
        self._arrivals: frozenset[int] = frozenset()
        #: Whether this engine has to step although its group has no request, because others do.
        self._together = False

    @property
    def _probe_dir(self) -> Path:
        return Path(os.environ["ALIGN_PROBE_DIR"])

    def launch(self, spec: EngineSpec, progress: Progress) -> None:
        write_launch(spec)
        os.environ[DP_RANK] = str(spec.dp_rank)
        self._ranks, self._dp_rank = spec.ranks, spec.dp_rank
        # Tokens that are drawn at random are not those that the workers prefer.
        self._samples = bool(split_options(spec.options).sampling)
        self._build(spec, progress)

    @abstractmethod
    def _build(self, spec: EngineSpec, progress: Progress) -> None:
        """Build the engine; what its workers must know is left already."""

    @abstractmethod
    def _key(self, generation: int, index: int, request: Request) -> str:
        """The engine's name of the ``index``-th request of run ``generation``; never used twice in one launch."""

    @abstractmethod
    def _execute(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Run the requests, by key, and return the ids that the engine itself returned, by request name."""

    def generate(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None) -> RunResult:
        assert all(request.forced is None for request in requests)
        return self._run(requests, top_k, capture)

    def replay(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None) -> RunResult:
        assert all(request.forced is not None for request in requests)
        return self._run(requests, top_k, capture)

    def repatch(self, files: Sequence[str]) -> None:
        """Let every worker put these patches in the place of those that it has.

        Workers look at what is announced when a step begins, so that it takes one: of one request of one token, whose
        result nobody uses. Of engines without data parallelism.
        """
        self._generation += 1
        request = Request("patches", (3,), 1)
        key = self._key(self._generation, 0, request)
        spec = RequestSpec(request.name, len(request.token_ids), request.max_new_tokens)
        write_spec(self._probe_dir, ProbeSpec(self._generation, 1, {key: spec}, patches=tuple(files)))
        self._execute({key: request})
        wait_for_ranks(self._probe_dir, self._generation, ranks=self._ranks)

    def _run(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None) -> RunResult:
        """Announce all requests of the side, and run those of this engine's data-parallel group."""
        self._generation += 1
        directory, ranks, run = self._probe_dir, self._ranks, self._generation
        keys = {self._key(run, index, request): request for index, request in enumerate(requests)}
        specs = {
            key: RequestSpec(
                request.name, len(request.token_ids), request.max_new_tokens, request.forced, request.arrival,
                request.dp_rank, request.stop_ids,
            )
            for key, request in keys.items()
        }  # fmt: skip
        write_spec(directory, ProbeSpec(run, top_k, specs, capture))
        own = {key: request for key, request in keys.items() if request.dp_rank == self._dp_rank}
        self._arrivals = frozenset(one.arrival for one in (requests if self._together else own.values()))
        if not own and not self._together:
            return RunResult((), (), 0.0, run)
        started = time.perf_counter()
        returned = self._execute(own)
        seconds = time.perf_counter() - started
        wait_for_ranks(directory, run, ranks=ranks)
        if capture is not None:  # it is copied soon
            wait_for_calls(directory / COLLECTIVES)
        names = [request.name for request in own.values()]
        said = read_generations(directory, run, names, rank=ranks[0], returned=returned)
        generations = tuple(map(_cut_at_stop, said, own.values()))
        for generation in () if self._samples else generations:
            _require_same(generation, returned[generation.request])
        self._leave_tokens(tuple(own.values()), generations, capture)
        return RunResult(generations, read_steps(directory, run, ranks), seconds, run)

    def _leave_tokens(
        self, requests: Sequence[Request], generations: Sequence[Generation], capture: CaptureSpec | None
    ) -> None:
        """Beside the records of the cache's indices: whose prefixes are equal."""
        folder = self._probe_dir / FOLDER
        if folder.is_dir():
            prompts = {request.name: request.token_ids for request in requests}
            tokens = {one.request: (*prompts[one.request], *one.token_ids) for one in generations}
            recording = "" if capture is None else Path(capture.directory).name
            write_run(folder, self._generation, recording, tokens, self._dp_rank)
