"""What a replay says together with the run that it repeats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from align.result.parts import Documented, Measure, Side


class PairedFault(Documented):
    """What a finding accuses, without its numbers."""

    path: Literal["A", "B", "C", "FA", "QUANT", "INPUT", "ENV", "UNLOCATED"]
    """As a finding has it."""
    kind: str
    """As a finding has it."""
    side: Side | None = None
    """Whose fault it is; null if it is not known."""
    checkpoint: str | None = None
    """The origin; null if it has none."""
    fault: str | None = None
    """The kind of a wrong cache index, or the fitted kind of the headline's error; null if it is not known."""


class Confounded(Documented):
    """Something that should be alike in both runs and is not."""

    what: Literal["version", "case", "model", "device", "condition", "recording", "tokens"]
    """Its group. ``recording``: what was judged, and by which bounds; ``tokens``: what the recording follows."""
    name: str
    """Which of the group."""
    before: str | None = None
    """Of the earlier run; null if it has none."""
    after: str | None = None
    """Of this run; null if it has none."""


class Paired(Documented):
    """A paired run: this run repeats an earlier one with something changed (``align replay``)."""

    earlier: str
    """Name of the earlier run's directory."""
    verdict: Literal["aligned", "diverged", "not comparable"]
    """Of the earlier run; also ``not comparable`` if it left no result that can be read."""
    why: str = ""
    """Why the earlier run is not comparable; empty if it is."""
    headline: PairedFault | None = None
    """The earlier run's first finding; null if there was none."""
    added: list[Measure]
    """Patches and options of this run that the earlier one did not have."""
    removed: list[Measure]
    """Patches and options of the earlier run that this one does not have: of an option with another value, or a patch
    with another content, the earlier one."""
    changes: int
    """How many variables differ so; an option or a patch that changed is one."""
    confounded: list[Confounded]
    """What else differs, and should not."""
    outcome: Literal["mended", "not mended", "moved", "same", "broken", "unknown"]
    """``mended``: diverged before, aligned now. ``not mended``: the same headline (path, kind, side, checkpoint,
    fault). ``moved``: diverged with another headline; ``gone`` and ``appeared`` say which. ``same``: aligned both
    times. ``broken``: aligned before, diverged now. ``unknown``: one of the two is not comparable."""
    conclusive: bool
    """Whether the outcome can be put down to what was changed: one thing at most, nothing is confounded, and both runs
    are comparable."""
    gone: list[PairedFault]
    """What the earlier run found and this one does not."""
    appeared: list[PairedFault]
    """What this run found and the earlier one did not."""
    what: str
    """All of it in one sentence."""
    told: dict[str, Any] = Field(default_factory=dict)
    """The same as data."""
