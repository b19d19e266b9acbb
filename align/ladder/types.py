"""What a ladder is made of: rungs, what came of them, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from align.layout import Dimension, Layout
from align.sentences import Said, text_of

Verdict = Literal["aligned", "diverged", "not comparable"]
#: Why a layout is run: the ladder's table (or the user's list) has it, or two dimensions changed at once around it.
Cause = Literal["listed", "inserted"]
#: ``introduced``: a simpler layout is aligned, and one dimension alone differs from it. ``everywhere``: the simplest
#: layout diverges, too. ``unclear``: several dimensions changed at once. ``nothing``: every rung is aligned.
#: ``unknown``: what would tell could not be compared.
State = Literal["introduced", "everywhere", "unclear", "nothing", "unknown"]


@dataclass(frozen=True)
class Headline:
    """The first finding of a rung.

    Attributes:
        path, kind, side, checkpoint: as a :class:`align.findings.Finding` has them.
        summary: it in one sentence.
    """

    path: str
    kind: str
    side: str | None
    checkpoint: str | None
    summary: str

    @property
    def short(self) -> str:
        """What it accuses, without numbers."""
        side = "" if self.side is None else f" of the {self.side}"
        at = "" if self.checkpoint is None else f" at {self.checkpoint}"
        return f"path {self.path}, {self.kind}{side}{at}"

    def like(self, other: Headline) -> bool:
        """Whether both accuse the same: one side, and one checkpoint if both name one, else one kind."""
        if self.side != other.side:
            return False
        if self.checkpoint is not None and other.checkpoint is not None:
            return _origin(self.checkpoint) == _origin(other.checkpoint)
        return self.kind == other.kind


def _origin(checkpoint: str) -> str:
    """A projection before its reduce is what it is after it where there is no reduce."""
    return checkpoint.removesuffix("_partial")


@dataclass(frozen=True)
class Ran:
    """What came of one layout.

    Attributes:
        headline: of a divergence; ``None`` if tokens alone differ, or nothing does.
        why: why it could not be compared, or where the run was refused; empty if it was.
        directory: of its run, relative to the whole run's; empty for the target, which is the whole run itself.
        seconds: that it took; 0 if it was there already.
        cause: why it was run.
    """

    layout: Layout
    verdict: Verdict
    headline: Headline | None = None
    why: str = ""
    directory: str = ""
    seconds: float = 0.0
    cause: Cause = "listed"


@dataclass(frozen=True)
class SelfRan:
    """One engine at the diverging layout against the same engine at the simpler one.

    Attributes:
        side: whose engine, in the run that diverged.
        engine: its name.
        ran: what came of it; ``layout`` is the diverging one.
        against: the simpler layout.
    """

    side: str
    engine: str
    ran: Ran
    against: Layout


@dataclass(frozen=True)
class Step:
    """The next layout to run."""

    layout: Layout
    cause: Cause


@dataclass(frozen=True)
class Conclusion:
    """What the rungs say together.

    Attributes:
        dimension: that introduces it; ``None`` unless the state is ``introduced``.
        changed: dimensions that changed between the last clean layout and the first diverging one.
        introduced_at: the first layout that diverges; ``None`` if none does.
        clean_at: the aligned layout that it is measured against; ``None`` if there is none.
        said: the sentence.
    """

    state: State
    said: Said
    dimension: Dimension | None = None
    changed: tuple[Dimension, ...] = ()
    introduced_at: Layout | None = None
    clean_at: Layout | None = None

    @property
    def sentence(self) -> str:
        """In English."""
        return text_of(self.said)


@dataclass(frozen=True)
class Ladder:
    """A whole walk, as far as it came.

    Attributes:
        target: the layout that was asked for.
        planned: the layouts from the simplest up, the target last.
        ran: what came of those that were run, from the simplest up.
        own: each accused engine against itself.
        conclusion: ``None`` while the walk goes on.
        notes: what the plan rests on, such as the device's memory.
    """

    target: Layout
    planned: tuple[Layout, ...]
    ran: tuple[Ran, ...] = ()
    own: tuple[SelfRan, ...] = ()
    conclusion: Conclusion | None = None
    notes: tuple[Said, ...] = ()
