"""The ladder of a run: the same case at simpler layouts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from align.result.paired import PairedFault
from align.result.parts import Documented, Side

LadderVerdict = Literal["aligned", "diverged", "not comparable"]
LadderDimension = Literal["tp", "dp", "ep"]


class LadderRung(Documented):
    """One layout, or one engine against itself at another layout."""

    layout: str
    """As in ``tp2 dp1 ep1``."""
    verdict: LadderVerdict
    """Of its run."""
    headline: str | None = None
    """Its first finding in one sentence; null if there is none."""
    fault: PairedFault | None = None
    """What the headline accuses, without its numbers; null if there is none."""
    why: str = ""
    """Why it could not be compared; empty if it was."""
    directory: str = ""
    """Of its run, with a report of its own, relative to this one's; empty for the target, which is this run."""
    cause: Literal["listed", "inserted"] = "listed"
    """``inserted``: several dimensions had changed at once, and this layout lies between."""


class LadderSelf(LadderRung):
    """One engine at the diverging layout against the same engine at the simpler one: it tells wrong parallelism from
    engines that differ."""

    side: Side
    """Whose engine, in the run that diverged."""
    engine: str
    """Its name."""
    against: str
    """The simpler layout."""
    told: dict[str, Any] = Field(default_factory=dict)
    """What it says, as data."""


class LadderConclusion(Documented):
    """What the rungs say together."""

    state: Literal["introduced", "everywhere", "unclear", "nothing", "unknown"]
    """``introduced``: by one dimension. ``everywhere``: the simplest layout diverges, too. ``unclear``: several
    dimensions changed at once. ``nothing``: every rung is aligned. ``unknown``: what would tell was not comparable."""
    dimension: LadderDimension | None = None
    """That introduces it; null unless the state is ``introduced``."""
    changed: list[LadderDimension] = Field(default_factory=list)
    """Dimensions that changed between ``clean_at`` and ``introduced_at``."""
    introduced_at: str | None = None
    """The first layout that diverges; null if none does."""
    clean_at: str | None = None
    """The aligned layout that it is measured against; null if there is none."""
    sentence: str
    """It in words."""
    told: dict[str, Any] = Field(default_factory=dict)
    """The same as data."""


class LadderResult(Documented):
    """The walk over simpler layouts."""

    target: str
    """The layout that was asked for."""
    planned: list[str]
    """From the simplest up, the target last."""
    rungs: list[LadderRung]
    """Those that were run, from the simplest up; the walk stops at the first that diverges."""
    own: list[LadderSelf] = Field(default_factory=list)
    """Each accused engine against itself."""
    conclusion: LadderConclusion | None = None
    """Null if the walk was broken off: ``align resume`` goes on with it."""
    notes: list[dict[str, Any]] = Field(default_factory=list)
    """What the plan rests on, such as the smallest TP that fits; as data."""
