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


class SymptomRow(Documented):
    """One row of the seeds' symptom tables."""

    row: str
    """Its id, as ``align explain`` takes it."""
    state: Literal["shown", "not shown", "not observable"]
    """Whether this run shows it; not observable is no "not shown"."""
    why: str
    """What that rests on."""


class Symptom(Documented):
    """What the trouble looks like, and where the seeds' tables would look for it."""

    names: list[str]
    """The most telling first; empty if nothing was compared."""
    rows: list[SymptomRow]
    """Every row of the tables of seed 003 step 4 and seed 000 §2.1."""
    suggested: list[str]
    """Paths that the rows shown suggest, those that most rows name first."""
    found: list[str]
    """Paths of the findings, the headline's first. They win over what is suggested."""
    agree: bool | None
    """Whether the headline's path is among the suggested; null if there is nothing to agree about."""


class Finding(Documented):
    """One thing that is wrong."""

    path: Literal["A", "B", "C", "FA", "QUANT", "INPUT", "ENV", "UNLOCATED"]
    """A KV-cache indices, B operator precision, C communication and parallelism; otherwise what it is instead."""
    kind: str
    """What exactly: ``weights``, ``operator``, ``host fallback``, ``slots``, ``unexplained``, ``tokens``,
    ``token_ids``, ``positions``."""
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
    """Requests that show it; empty for all or unknown."""
    positions: list[int] = Field(default_factory=list)
    """Token positions that show it, from 0, worst first; empty for all or unknown."""
    ranks: list[int] = Field(default_factory=list)
    """Ranks that show it; empty for all or unknown."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """Numbers with their bounds, and names; ``what`` says it in words."""
    next: str = ""
    """What to do next."""
    summary: str
    """All of it in one sentence."""


class Scope(Documented):
    """How far the trouble reaches. Empty lists mean none or not known, see the findings."""

    origin_layers: list[int] = Field(default_factory=list)
    """Layers where something goes wrong by itself."""
    reached_layers: list[int] = Field(default_factory=list)
    """Layers with a checkpoint that differs by more than rounding."""
    checkpoints_beyond: int | None = None
    """How many checkpoints differ by more than rounding; null without tensors."""
    phases: list[str] = Field(default_factory=list)
    """Phases that the findings name."""
    requests: list[str] = Field(default_factory=list)
    """Requests that a finding names or whose tokens really differ."""
    ranks: list[int] = Field(default_factory=list)
    """Ranks that a finding names."""


class TokenDifference(Documented):
    """One place where the sides prefer different tokens."""

    request: str
    """Its request."""
    index: int
    """Of the generated token, from 0."""
    position: int | None
    """In the sequence: prompt length + index."""
    kind: Literal["token", "length", "nonfinite"]
    """Different ids, an end on one side alone, or a logprob that is no number."""
    candidate_id: int | None
    """Null where the side has no token."""
    reference_id: int | None
    """Null where the side has no token."""
    candidate_margin: Number | None
    """How much the candidate prefers its own id, in natural-log probability; null if it lists only one of the two."""
    reference_margin: Number | None
    """The same of the reference."""
    tolerance: Number
    """What the measured noise allows, in natural-log probability."""
    near_tie: bool
    """Both margins are known and within the tolerance: no finding."""
    why: str
    """Reason, in words."""


class TokenRequest(Documented):
    """One request's tokens."""

    request: str
    """Its name."""
    outcome: Literal["equal", "near_tie", "diverged"]
    """Equal, different by near-ties only, or really different."""
    equal: int
    """Tokens that agree before the first difference (replay: in all)."""
    compared: int
    """Tokens with the same history on both sides, the first differing one included."""
    total: int
    """Tokens of the longer side."""


class TokenRun(Documented):
    """The tokens of one run of both sides."""

    verdict: Literal["aligned", "diverged"]
    """Of the tokens alone."""
    noise: Number | None
    """Largest difference of logprobs that both sides list, in natural-log probability; null if none was shared."""
    floor: float
    """Noise that is always allowed, in the same unit."""
    cap: float
    """Noise that is never exceeded, in the same unit."""
    noise_above_cap: bool
    """The logprobs differ by more than rounding explains, whatever the tokens say."""
    requests: list[TokenRequest]
    """In the reference's order."""
    differences: list[TokenDifference]
    """All that are comparable, request by request."""


class Tokens(Documented):
    """Greedy tokens."""

    verdict: Literal["aligned", "diverged"]
    """Of both runs together."""
    total: int
    """Tokens of the free run, over all requests."""
    first: TokenDifference | None
    """The earliest real difference; null if there is none."""
    free: TokenRun
    """Each side feeds its own tokens back."""
    replay: TokenRun | None = None
    """Both sides are forced along the reference's tokens; null if that was not done."""


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
    first: dict[str, Any] | None = None
    """The first token that was not repeated: request, index, and the ids of both runs."""


class Seen(Documented):
    """Checkpoints seen of checkpoints that the model has."""

    expected: int
    """How many the model has."""
    observed: int
    """How many were seen in every step and on every rank."""
    percent: float
    """0 to 100."""
    missing: list[str]
    """Seen nowhere."""
    partial: list[str]
    """Not seen in some step or on some rank."""
    why: dict[str, str]
    """Reasons by name, where they are known."""


class Coverage(Documented):
    """How much was looked at. What was not is no pass."""

    candidate: Seen
    """What the candidate recorded."""
    reference: Seen
    """What the reference recorded."""
    paired: Seen
    """What was compared."""
    demanded: float | None = None
    """Percent without which nothing is called aligned; null if none was demanded."""


class CheckpointNumbers(Documented):
    """One checkpoint's distance between the sides. Null is not known, as of digests alone."""

    name: str
    """The checkpoint, or what a hand-written file is called."""
    verdict: Literal["equal", "within", "beyond", "not observable", "not comparable"]
    """By the policy in use."""
    inputs: Literal["equal", "within", "beyond", "unknown"]
    """What its inputs are."""
    why: str
    """Reason, with number and bound."""
    rows: int
    """Rows that were compared: one per request and position."""
    estimated: bool
    """From random projections, because a side kept no values."""
    max_abs: Number | None
    """Largest absolute difference of an element."""
    max_rel: Number | None
    """Largest relative difference of an element, in float32, denominator at least 1e-8 (seed 003)."""
    max_rel_bound: float
    """The seeds' threshold for it."""
    seed: bool | None
    """Whether the seeds' threshold accepts it."""
    cosine: Number | None
    """Of the two tensors as vectors; the seeds give no limit."""
    rel_l2: Number | None
    """Norm of the difference over the norm of the reference."""
    rel_l2_bound: float
    """What the policy allows: the derived bound at that depth, or the calibrated floor."""


class Floor(Documented):
    """A calibrated floor: how far right engines were apart in clean runs, which ``align calibrate`` measured."""

    name: str
    """Of the floor."""
    simulated: bool
    """Calibrated on a simulated device, which says nothing about real kernels."""
    factor: float
    """On all of its limits; 1 unless it was calibrated in other circumstances."""
    why: str
    """Of the factor; empty for 1."""
    wider: bool
    """Whether its limits may exceed the derived bounds: a simulated floor on hardware."""
    judged: int
    """Checkpoints that it judged; the others were judged by derived bounds."""


class Tensors(Documented):
    """The comparison of tensors in short."""

    policy: Literal["derived", "seed"]
    """What judges: allowances derived from dtype and depth, or the seeds' thresholds alone."""
    floor: Floor | None = None
    """The floor that narrows the derived allowances; null if these judge alone."""
    counts: dict[str, int]
    """Checkpoints by verdict."""
    rows: int
    """Paired rows: one per request and position. Of files that are compared by name, as many as the longest has."""
    first_divergence: str | None
    """The first checkpoint, layer 0 first, that rounding does not explain."""
    beyond: list[str]
    """All of these, in order."""
    shown: list[CheckpointNumbers]
    """The accused ones, the first divergence, and the one that is furthest apart."""
    notes: list[str]
    """What could not be checked."""


class WeightsAudit(Documented):
    """Live parameters against the checkpoint's files, every row of every rank's share."""

    equal: int
    """How many are equal."""
    differs: int
    """How many differ; findings name them."""
    not_observable: list[str]
    """Those that could not be looked at."""


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
    """What was done: ``launch``, ``conditions``, ``generate``, ``generate again``, ``tokens``, ``replay``, ``record``,
    ``compare``, ``record alone``, ``record again``,
    ``diagnose``, ``read``."""
    state: Literal["done", "stopped", "not reached"]
    """``stopped``: the comparison ended here, for the result's ``reason``."""
    why: str
    """Why it was made."""
    found: str = ""
    """What it found."""
    about: dict[str, Any] = Field(default_factory=dict)
    """The numbers in ``found``."""
