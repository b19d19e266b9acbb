"""What was tried after something was found: one request by itself, and the accused checkpoint in float64."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from align.result.parts import Documented
from align.run.report import Report
from align.walk.alone import Alone
from align.walk.diagnosis import Diagnosis


class PairTried(Documented):
    """Batch isolation: the request together with one other at a time."""

    requests: list[str]
    """The two that show it together; empty if no pair that was tried does. Two of two need no trial."""
    tried: list[str]
    """With whom it was tried, in order."""
    found: str | None = None
    """What the pair's own headline says; null if nothing is wrong, or it was the whole batch."""


class AloneTried(Documented):
    """The request that shows the headline, run without the others (seed 003: a single request first)."""

    request: str
    """Its name."""
    checkpoint: str
    """What it was tried for."""
    reproduced: bool
    """Whether the same is wrong at the same place. If not, look at what a batch changes."""
    found: str | None = None
    """What its own headline says; null if nothing is wrong."""
    values: list[str]
    """Patterns of the checkpoints whose values were recorded of it."""
    verified: dict[str, str]
    """The same checkpoint in layers that were recorded beside the accused one, by layer."""
    pair: PairTried | None = None
    """Whom it takes, where the request alone is right; null if it shows the same alone, or has no company."""


class OracleSide(Documented):
    """One side's operator against float64 on the inputs that this side recorded."""

    verdict: str
    """``within``, ``beyond`` or ``not observable``."""
    why: str
    """Its reason."""
    ratio: float | str
    """The largest error of an element in units of its bound; at most 1 for a right kernel."""
    roundings: float | str
    """The same in units of roundoff times magnitude."""
    allowed: float
    """How many of those are possible."""
    bit_equal: bool
    """What was recorded equals the float64 result rounded once, in every element."""
    rows: int
    """How many rows were recomputed."""


class FaultFit(Documented):
    """One kind of fault that reproduces the error, or a pattern of an error that nothing reproduces."""

    kind: str
    """A row of the table of fault kinds."""
    explains: bool
    """Whether it reproduces what was recorded down to the noise."""
    text: str
    """The evidence, one sentence."""
    sentence: dict[str, str]
    """What the kind means, by language."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Fitted numbers and names."""
    told: dict[str, Any] = Field(default_factory=dict)
    """``text`` as data; empty in results of an earlier version."""


class Diagnosed(Documented):
    """The headline's checkpoint, recomputed."""

    checkpoint: str
    """Its name."""
    operator: str
    """That makes it; empty if it was not recomputed."""
    side: str | None = None
    """Whose operator errs; null if both, neither, or it is not observable."""
    why: str
    """How that is known."""
    told: dict[str, Any] = Field(default_factory=dict)
    """The same as data; empty in results of an earlier version."""
    fault: str | None = None
    """The first kind that explains the error; null if none does."""
    sides: dict[str, OracleSide]
    """By side."""
    fits: list[FaultFit]
    """The simplest first."""
    channels: list[int]
    """Flat canonical channels beyond their bound, worst first; at most 64."""
    channels_total: int
    """How many there are."""
    channels_of: int | None = None
    """How many channels the checkpoint has; null if that is not known."""
    heads: list[int]
    """Heads beyond their bound; empty for a checkpoint without heads."""


def alone_of(alone: Alone | None) -> AloneTried | None:
    """The part of the result."""
    if alone is None:
        return None
    return AloneTried(
        request=alone.request,
        checkpoint=alone.checkpoint,
        reproduced=alone.reproduced,
        found=alone.found,
        values=list(alone.values),
        verified={str(layer): state for layer, state in (alone.verified or {}).items()},
        pair=None
        if alone.pair is None
        else PairTried(requests=list(alone.pair.requests), tried=list(alone.pair.tried), found=alone.pair.found),
    )


def diagnosed_of(found: Diagnosis | None) -> Diagnosed | None:
    """The part of the result."""
    if found is None:
        return None
    plain = found.to_dict()
    names = ("verdict", "why", "ratio", "roundings", "allowed", "bit_equal", "rows")
    return Diagnosed(
        checkpoint=found.checkpoint,
        operator=found.operator,
        side=found.side,
        why=found.why,
        told=plain["told"],
        fault=found.kind,
        sides={role: OracleSide(**{name: one[name] for name in names}) for role, one in plain["sides"].items()},
        fits=[
            FaultFit(**{name: fit[name] for name in ("kind", "explains", "text", "sentence", "parameters", "told")})
            for fit in plain["fits"]
        ],
        channels=plain["channels"],
        channels_total=plain["channels_total"],
        channels_of=plain["channels_of"],
        heads=plain["heads"],
    )


def walked_of(report: Report) -> dict[str, Any]:
    """Both parts, JSON-able."""
    alone, diagnosed = alone_of(report.alone), diagnosed_of(report.diagnosis)
    return {
        "alone": None if alone is None else alone.model_dump(mode="json"),
        "diagnosis": None if diagnosed is None else diagnosed.model_dump(mode="json"),
    }
