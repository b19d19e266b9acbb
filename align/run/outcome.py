"""What is known of a run's sides, as it becomes known."""

from __future__ import annotations

from dataclasses import dataclass, field

from adapters.base import EngineSpec, Observation, RunResult
from adapters.host import Launched
from adapters.probe.spec import CaptureSpec
from align.run.plan import SideExtras


@dataclass
class SideOutcome:
    """What is known of one side; ``None`` where it did not get that far.

    Attributes:
        engine: its name.
        spec: what the engine was asked for.
        launched: what runs.
        observations: what was read back from the live engine.
        free: the free-running greedy generation.
        again: the same once more, to see whether this side repeats itself.
        fresh: the free run of another engine that was launched alike, to see whether anything is left behind.
        replay: generation along given ids; the one that was recorded, if any.
        captures: what was asked to be recorded, in order; the last one is what the trace holds.
        extras: options and patches of this side alone.
    """

    engine: str
    spec: EngineSpec | None = None
    launched: Launched | None = None
    observations: list[Observation] = field(default_factory=list)
    free: RunResult | None = None
    again: RunResult | None = None
    fresh: RunResult | None = None
    replay: RunResult | None = None
    captures: list[CaptureSpec] = field(default_factory=list)
    extras: SideExtras = field(default_factory=SideExtras)


@dataclass
class Outcome:
    """The sides of a run, by role."""

    sides: dict[str, SideOutcome]
