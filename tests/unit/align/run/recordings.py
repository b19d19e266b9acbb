"""A joint run without engines: both sides' workers are a made-up two-layer Llama, written by the real writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.base import SIDES, EngineSpec, Generation, Observation, Request, RowSpan, RunResult, TokenStep
from adapters.probe.spec import CaptureSpec, TransplantSpec
from adapters.probe.transplant import read_tensors
from align.case.schema import Case, CaseRequest, Decoding
from align.conditions import Condition
from align.models.info import ModelInfo
from align.run.outcome import Outcome, SideOutcome
from align.run.plan import forced_along
from align.run.recording import kept
from align.trace.format import POSITIONS, TOKEN_IDS, USED
from tests.unit.align.compare import traces
from tests.unit.align.run import fakes

ENGINES = dict(zip(SIDES, ("lmdeploy", "vllm"), strict=True))


def case(**fields: Any) -> Case:
    requests = [CaseRequest(name=name, token_ids=ids) for name, ids in traces.PROMPTS.items()]
    return fakes.case(*requests, decoding=Decoding(max_new_tokens=2, top_logprobs=3), **fields)


def info() -> ModelInfo:
    return replace(fakes.info(layers=2), config=traces.CONFIG)


def generations(ids: Mapping[str, tuple[int, ...]] | None = None, logprob: float = -0.25) -> tuple[Generation, ...]:
    """What :data:`traces.GENERATED` says, or other ids; the next id follows at a distance."""
    return tuple(
        Generation(name, tuple(TokenStep(one, one, ((one, logprob), (one + 1, -2.5)), 7.0) for one in row))
        for name, row in (ids or traces.GENERATED).items()
    )


def condition(verdict: Any = "ok", name: str = "eager", allowed: bool = False) -> Condition:
    observed = {"candidate": True, "reference": verdict == "ok"}
    return Condition(
        name, True, "the procedure", observed, {}, verdict, "because", "switch it on", "seed", allowed=allowed
    )


class Scripted:
    """Stands in for a session: every stage succeeds, and a recorded replay leaves a trace.

    Attributes:
        edits: by role, what the side's tensors are changed by, as in :func:`traces.write`.
        runs: by role, ids of the first, the second and the recorded run's greedy choice; absent means the usual ones.
        weights: by role, the audit that its workers leave.
        stages: what was called.
        repairs: whether a transplant of these names undoes the side's edits.
        replaced: rows that the workers say they replaced; by default all that they were given.
    """

    roles = SIDES

    def __init__(self, directory: Path) -> None:
        self.directories = {role: directory / role for role in SIDES}
        for path in self.directories.values():
            path.mkdir(parents=True)
        self.edits: dict[str, traces.Edit] = {}
        self.runs: dict[str, dict[str, tuple[Generation, ...]]] = {role: {} for role in SIDES}
        self.weights: dict[str, list[dict[str, Any]]] = {}
        #: Of the model.
        self.config: Mapping[str, Any] = traces.CONFIG
        #: Whether what ``edits`` does is seen in the whole batch alone.
        self.batch_only = False
        self.stages: list[str] = []
        self.repairs: Callable[[tuple[str, ...]], bool] = lambda names: False
        self.replaced: int | None = None
        self.said: list[str] = []
        self.failure: Exception | None = None
        self.outcome = Outcome({role: SideOutcome(engine) for role, engine in ENGINES.items()})

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.stages.append("closed")

    def say(self, stage: str, detail: str = "") -> None:
        self.said.append(f"{stage} {detail}")

    def launch(self) -> None:
        self.stages.append("launch")
        for role, side in self.outcome.sides.items():
            side.launched = fakes.launched()
            side.spec = EngineSpec(side.engine, role, "/models/tiny", "bfloat16", str(self.directories[role]))
            side.observations = [Observation("tp", 1, "config")]
            records = json.dumps(self.weights.get(role, []))
            (self.directories[role] / "weights-rank0.json").write_text(records)

    def observe(self) -> None:
        self.stages.append("observe")

    def observe_again(self, role: str) -> None:
        self.stages.append(f"observe {role}")

    def _run(self, role: str, name: str) -> RunResult:
        return RunResult(self.runs[role].get(name, generations()), (), 1.0)

    def generate(self) -> None:
        self.stages.append("generate")
        if self.failure is not None:
            raise self.failure
        for role, side in self.outcome.sides.items():
            side.free = self._run(role, "free")

    def generate_again(self) -> None:
        self.stages.append("again")
        for role, side in self.outcome.sides.items():
            side.again = self._run(role, "again")

    def generate_fresh(self, roles: Collection[str]) -> None:
        """Unless a run ``fresh`` is given, a fresh engine does what the second run did."""
        self.stages.append(f"fresh {' '.join(roles)}")
        for role in roles:
            self.outcome.sides[role].fresh = self._run(role, "fresh" if "fresh" in self.runs[role] else "again")

    def forced(self, along: tuple[Generation, ...] | None = None, only: Collection[str] = ()) -> tuple[Request, ...]:
        reference = self.outcome.sides["reference"].free
        assert reference is not None
        forced = forced_along(case().to_requests(), along or reference.generations)
        return tuple(request for request in forced if not only or request.name in only)

    def replay_some(
        self, only: Collection[str], along: tuple[Generation, ...] | None, captures: Mapping[str, CaptureSpec]
    ) -> dict[str, RunResult]:
        """Only these requests' rows are written; what ``edits`` does is done to them too unless ``batch_only``."""
        self.stages.append("record alone")
        results = {}
        for role in self.roles:
            run = self._run(role, "replay")
            results[role] = replace(run, generations=tuple(one for one in run.generations if one.request in only))
            edit = None if self.batch_only else self.edits.get(role)
            write_trace(Path(captures[role].directory), captures[role], edit, only, self.config)
        return results

    def replay(
        self,
        along: tuple[Generation, ...] | None = None,
        captures: Mapping[str, CaptureSpec] | None = None,
        only: str = "",
    ) -> None:
        self.stages.append(f"record {only}".rstrip() if captures else "replay")
        for role, side in self.outcome.sides.items():
            if only and role != only:
                continue
            side.replay = self._run(role, "replay")
            look = (captures or {}).get(role)
            if look is not None:
                write_trace(Path(look.directory), look, self.edits.get(role), config=self.config)
                side.captures.append(look)

    def replay_apart(
        self, captures: Mapping[str, CaptureSpec], along: tuple[Generation, ...] | None = None
    ) -> dict[str, RunResult]:
        self.stages.append(f"apart {', '.join(captures)}")
        for role, look in captures.items():
            edit = self.edits.get(role)
            if look.transplant is not None:
                given = Path(look.transplant.directory)
                rows = json.loads((given / "rows.json").read_text())
                counts = {name: len(rows[name]) if self.replaced is None else self.replaced for name in rows}
                (given / "rank0.json").write_text(json.dumps({"rank": 0, "rows": counts}))
                edit = None if self.repairs(look.transplant.checkpoints) else edit
            write_trace(Path(look.directory), look, edit, config=self.config)
        return {}


def write_trace(
    directory: Path,
    look: CaptureSpec,
    edit: traces.Edit | None = None,
    only: Collection[str] = (),
    config: Mapping[str, Any] = traces.CONFIG,
) -> None:
    """A trace without its manifest, which is the driver's to write; of ``only`` some requests if any are named."""
    chosen = [(phase, [span for span in spans if not only or span.request in only]) for phase, spans in traces.STEPS]
    steps = [step for step in chosen if step[1]]

    def only_kept(phase: str, step: int, tensors: dict[str, Any]) -> None:
        if edit is not None:
            edit(phase, step, tensors)
        if look.routing is not None:
            tensors.update(used(look.routing, steps[step][1]))
        for name in set(tensors) - {TOKEN_IDS, POSITIONS}:
            if not kept(name.partition("#")[0], look.values):
                del tensors[name]

    traces.write(directory, steps=steps, edit=only_kept, config=config).close()
    (directory / "trace.json").unlink()


def used(routing: TransplantSpec, spans: Sequence[RowSpan]) -> dict[str, Tensor]:
    """What workers record of a routing that they replay: everything that they were given."""
    keys = [(span.request, at, span.occurrence) for span in spans for at in range(span.start, span.start + span.count)]
    found = {}
    for name in routing.checkpoints:
        tensor, rows = read_tensors(Path(routing.directory), name)
        found[f"{name}{USED}"] = torch.stack([tensor[rows.index(key)] for key in keys])
    return found
