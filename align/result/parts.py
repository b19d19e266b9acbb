"""The parts of a result. Every field says what it means, so that the published schema does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Side = Literal["candidate", "reference"]
#: A number that may be infinite or undefined, which JSON cannot say.
Number = float | Literal["inf", "-inf", "nan"]
Status = Literal["answered", "derived", "unknown"]


class Documented(BaseModel):
    """A model whose fields are described by the text below them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Fact(Documented):
    """One thing that is asked before anything is debugged."""

    name: Literal[
        "model",
        "hardware",
        "symptom",
        "layout",
        "onset",
        "batching",
        "optimisation_stage",
        "execution_mode",
        "quantisation",
        "baseline",
    ]
    """What is asked."""
    status: Status
    """``answered`` by the user, ``derived`` by the run, or ``unknown``."""
    value: str | None = None
    """The answer, or what was derived; null if unknown."""
    observed: str | None = None
    """What the run saw where the user answered; null if it saw nothing about it."""
    about: dict[str, Any] = Field(default_factory=dict)
    """Numbers and names that it rests on."""


class Finding(Documented):
    """One thing that is wrong."""

    path: Literal["A", "B", "C", "FA", "QUANT", "INPUT", "ENV", "UNLOCATED"]
    """A KV-cache indices, B operator precision, C communication and parallelism; otherwise what it is instead."""
    kind: str
    """What exactly: ``weights``, ``operator``, ``host fallback``, ``slots``, ``arguments``, ``unexplained``,
    ``tokens``, ``token_ids``, ``positions``."""
    side: Side | None = None
    """Whose fault it is; null if it is not known."""
    checkpoint: str | None = None
    """The origin, as in ``layers.2.mlp_norm``; null if it has none."""
    layer: int | None = None
    """Of the checkpoint."""
    phase: Literal["prefill", "decode", "mixed"] | None = None
    """Null for both or unknown."""
    step: int | None = None
    """Engine step on that side, from 0; null if unknown or many."""
    requests: list[str] = Field(default_factory=list)
    """Requests that show it; of an ``operator``, ``collective``, ``unexplained`` or ``nonfinite`` the worst one alone
    (``scope`` has the others). Empty for all or unknown."""
    positions: list[int] = Field(default_factory=list)
    """Token positions that show it, from 0; of these kinds the worst one alone. Empty for all or unknown."""
    ranks: list[int] = Field(default_factory=list)
    """Ranks that show it; empty for all or unknown."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Numbers with their bounds, and names; ``what`` says it in words, ``sentence`` is the same as data."""
    next: str = ""
    """What to do next."""
    summary: str
    """All of it in one sentence."""


class Condition(Documented):
    """One controlled setting."""

    name: str
    """What ``--allow`` takes."""
    requested: Any
    """What the case, the checkpoint or the procedure demands."""
    requested_from: str
    """Where that comes from."""
    observed: dict[str, Any]
    """By side, as read back from the live engine; null where it could not be read."""
    where: dict[str, str]
    """By side, what said so."""
    verdict: Literal["ok", "false", "unknown"]
    """Unknown is no pass."""
    why: str
    """What the verdict rests on."""
    why_told: dict[str, Any] | None = None
    """The same as data; null in results of an earlier version."""
    mend: str
    """What to do about it."""
    source: str
    """The document that demands it."""
    required: bool
    """Whether it stops the comparison unless it is ok; the others inform."""
    allowed: bool
    """The user goes on without it."""
    sides: list[str]
    """Those that do not meet it."""
    places: dict[str, list[str]]
    """By side, modules whose value is not what is requested, where that of most is."""
    told: bool
    """A finding says it instead of stopping: the engine computes otherwise than its checkpoint says."""
    blocks: bool
    """Whether it stopped the comparison."""


class SideStability(Documented):
    """Two runs of one side."""

    side: Side
    """Which."""
    stable: bool
    """The second run gave the same tokens."""
    tokens: int
    """How many were compared."""
    noise: Number | None
    """Largest difference of the two runs' logprobs, in natural-log probability; null if it could not be measured."""
    near_ties: int = 0
    """Tokens that differ by what rounding explains, where the second run found prefixes in a cache."""
    first: dict[str, Any] | None = None
    """The first token that was not repeated: request, index, and the ids of both runs."""


class WeightsAudit(Documented):
    """Live parameters against the checkpoint's files, every row of every rank's share."""

    equal: int
    """How many are equal."""
    differs: int
    """How many differ; findings name them."""
    not_observable: list[str]
    """Those that could not be looked at."""


class Recording(Documented):
    """What one side's recording consists of."""

    ranks: list[int]
    """That left records."""
    steps: int
    """Forwards of ranks that served requests; each has records of its own."""
    dummies: int
    """Forwards of ranks that served none; of these nothing is compared."""
    damaged: list[str]
    """What cannot be read, and why."""


class Measure(Documented):
    """What one side ran with that is no part of the case: a fix that is tried, or a fault that is injected."""

    side: Side
    """Which."""
    kind: Literal["patch", "option"]
    """``--patch`` or ``--set``."""
    file: str
    """The file that changes: what the patch says of itself, or else the patch; of an option its name."""
    value: Any = None
    """Of an option: what it was set to; null for a patch."""
    change: str | None
    """What changes; null if the patch does not say so."""
    reason: str | None
    """Why; null if nothing says so."""
    sha256: str | None = None
    """Of the patch; null for an option, or if the file is not there."""


class WalkStep(Documented):
    """One stage."""

    stage: str
    """What was done: ``launch``, ``conditions``, ``generate``, ``generate again``, ``fresh engine``, ``tokens``,
    ``replay``, ``record``, ``audit``, ``compare``, ``record alone``, ``record again``, ``replay routing``,
    ``diagnose``, ``read``."""
    state: Literal["done", "stopped", "not reached"]
    """``stopped``: the comparison ended here, for the result's ``reason``."""
    why: str
    """Why it was made."""
    found: str = ""
    """What it found."""
    about: dict[str, Any] = Field(default_factory=dict)
    """The numbers in ``found``."""
