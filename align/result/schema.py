"""The result of a run or of a comparison of two recordings, as programs read it: ``result.json``.

The same case run twice gives the same result apart from ``timing`` and ``environment``, which hold everything that
belongs to one run: times, paths, process ids. Numbers that are not finite are the strings ``inf``, ``-inf``, ``nan``.
``align schema`` publishes it as JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from align.result.arguments import ArgumentAudit, ArgumentsBeside
from align.result.checklists import Checklist
from align.result.collectives import CollectivesAudit
from align.result.ladder import LadderResult
from align.result.ledger import LedgerAudit
from align.result.paired import Paired
from align.result.parts import (
    Condition,
    Documented,
    Fact,
    Finding,
    Measure,
    Recording,
    SideStability,
    WalkStep,
    WeightsAudit,
)
from align.result.scope import Scope
from align.result.symptom import Symptom
from align.result.tensors import Coverage, Tensors
from align.result.tokens import Tokens
from align.result.walked import AloneTried, Diagnosed

__all__ = [
    "SCHEMA_VERSION",
    "CaseSummary",
    "Environment",
    "RequestSummary",
    "Result",
    "Timing",
    "json_schema",
    "without_times",
]

#: Of this format, as every result says.
SCHEMA_VERSION: Final = 2
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]+$")]


class RequestSummary(Documented):
    """One request of the case."""

    name: str
    """Its name in every record."""
    prompt_tokens: int
    """Length of the prompt in tokens."""


class CaseSummary(Documented):
    """What was run; ``case.json`` in the run's directory has all of it."""

    model: str
    """Preset, or name of the checkpoint's directory."""
    fingerprint: str
    """Of the checkpoint: its file names and sizes, and its configuration."""
    sha256: Hex
    """Of the case in canonical JSON: two results with the same value ran the same."""
    dtype: str
    """bfloat16 or float16."""
    layout: str
    """Tensor, data and expert parallel sizes, as in ``tp2 dp1 ep1``."""
    reference_layout: str | None = None
    """Of the reference, where it has another one: an engine against itself at a simpler layout; null otherwise."""
    max_new_tokens: int
    """Tokens to generate per request."""
    block_size: int
    """Tokens in one KV-cache block."""
    numerics: dict[str, str | None]
    """By side: numerics of the simulated operators; null is the default, and means nothing on hardware."""
    requests: list[RequestSummary]
    """In order."""


class Timing(Documented):
    """Everything that is a time."""

    started: str | None = None
    """When the command began, ISO 8601 with the offset from UTC."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By stage, in the order of the first use."""
    rungs: dict[str, float] = Field(default_factory=dict)
    """Seconds of each rung of the ladder, by its directory."""


class Environment(Documented):
    """What belongs to this run on this machine and is no result."""

    directory: str | None = None
    """The run's directory. ``RUN`` stands for it in other texts."""
    argv: list[str] = Field(default_factory=list)
    """The command as it was typed."""
    model_path: str | None = None
    """Directory of the checkpoint."""
    traces: dict[str, str] = Field(default_factory=dict)
    """By side: the recording that was compared."""
    patches: dict[str, list[str]] = Field(default_factory=dict)
    """By side: paths of the files that ran in its workers."""
    pythons: dict[str, str] = Field(default_factory=dict)
    """By side: its interpreter."""
    pids: dict[str, list[int]] = Field(default_factory=dict)
    """By side: its host and the workers of the engine."""
    bytes: dict[str, int] = Field(default_factory=dict)
    """By side: size of its last recording."""


class Result(Documented):
    """What was found out about one pair of engines on one case."""

    model_config = ConfigDict(title="Result of align run or align compare")

    schema_version: Literal[2] = SCHEMA_VERSION
    """Version of this format: raised when a field changes its meaning or goes away, not when one is added."""
    source: Literal["run", "compare"]
    """Both engines run together, or two recordings compared."""
    verdict: Literal["aligned", "diverged", "not comparable"]
    """Exit codes 0, 1 and 2. Any finding is a divergence, also where these prompts' tokens happen to agree."""
    reason: str = ""
    """Why the sides could not be compared; with ``diverged``: what ended the run early. Empty otherwise."""
    reason_told: dict[str, Any] | None = None
    """The same as data; null where it was made as text, or in results of an earlier version."""
    next: str = ""
    """What to do now, one sentence."""
    remarks: list[str] = Field(default_factory=list)
    """What one should know about how the recordings were given, such as that the sides were changed over."""
    simulated: bool | None = None
    """Whether a side ran on a simulated NPU, which says nothing about real kernels; null if that is not known."""
    engines: dict[str, str]
    """By side."""
    case: CaseSummary | None = None
    """Null if the command stopped before there was a case."""
    facts: list[Fact]
    """What is asked at the beginning of every investigation (seed 003 step 1, seed 000 step 1)."""
    symptom: Symptom | None = None
    """Derived from tokens and findings; null in results of an earlier version."""
    findings: list[Finding]
    """What is wrong, the headline first."""
    alone: AloneTried | None = None
    """The request that shows the headline, run by itself; null if that was not tried."""
    diagnosis: Diagnosed | None = None
    """The headline's checkpoint in float64, and the kind of fault; null if there is none, or no values of it."""
    transplants: list[dict[str, Any]] = Field(default_factory=list)
    """What came of putting the other side's tensors in the accused side's place: ``verdict`` (``confirmed``,
    ``refuted``, ``not measurable``, ``not possible``), ``why``, and the errors before and after."""
    scope: Scope
    """Which layers, requests and ranks are affected."""
    tokens: Tokens | None = None
    """Greedy tokens of both sides; null if they were not compared."""
    conditions: list[Condition]
    """What must hold for the comparison to mean anything, requested and read back."""
    stability: list[SideStability]
    """Whether each side repeats its own tokens."""
    coverage: Coverage | None = None
    """How many of the model's checkpoints were seen; null without tensors."""
    surplus: dict[str, int] = Field(default_factory=dict)
    """By side: rows of the recording that it computed ahead of what was asked for; they need no partner."""
    tensors: Tensors | None = None
    """The comparison of tensors in short; null if none were compared."""
    weights: dict[str, WeightsAudit]
    """By side: live parameters against the checkpoint's files; absent where no audit was left."""
    ledger: dict[str, LedgerAudit] = Field(default_factory=dict)
    """By side: the audit of the KV cache's indices; absent where it was not reached, and in results of an earlier
    version."""
    collectives: dict[str, CollectivesAudit] = Field(default_factory=dict)
    """By side with several ranks: the audit of its collectives; absent in results of an earlier version."""
    arguments: dict[str, ArgumentAudit] = Field(default_factory=dict)
    """By side: the arguments of its attention and cache operators; absent where it was not reached, and in results of
    an earlier version."""
    arguments_beside: list[ArgumentsBeside] = Field(default_factory=list)
    """Both sides' attention calls, argument by argument, for each phase and each group of layers that are alike."""
    recordings: dict[str, Recording] = Field(default_factory=dict)
    """By side: what was compared consists of; absent where nothing was, and in results of an earlier version."""
    measures: list[Measure]
    """What one side ran with that is no part of the case: patches and engine options."""
    paired: Paired | None = None
    """Of a replay: what it says together with the run that it repeats; null for any other run, and in results of an
    earlier version."""
    ladder: LadderResult | None = None
    """The same case at simpler layouts; null if it was not walked, and in results of an earlier version."""
    checklists: list[Checklist] = Field(default_factory=list)
    """The lists of the seeds, item by item, as ``align checklist`` evaluates them; empty in results of an earlier
    version."""
    walk: list[WalkStep]
    """The stages in order: why each was made and what it found."""
    versions: dict[str, dict[str, str]]
    """Packages by side; ``align`` is this program and its Python."""
    command: list[str]
    """The command without what belongs to one run alone, such as ``--out``."""
    timing: Timing = Field(default_factory=Timing)
    """Differs from run to run."""
    environment: Environment = Field(default_factory=Environment)
    """Differs from run to run."""
    details: dict[str, Any] | None = None
    """``align compare``: the whole comparison, as ``run.json`` holds it for a run (no stable format)."""


def json_schema() -> dict[str, Any]:
    """The format as JSON Schema (draft 2020-12)."""
    schema = Result.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def without_times(result: Result) -> dict[str, Any]:
    """What must be the same whenever the same case runs."""
    return BaseModel.model_dump(result, mode="json", exclude={"timing", "environment"})
