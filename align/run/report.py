"""Everything that a comparison found out, filled as it goes on, so that whatever stops it leaves what is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from align.attention.audit import Audited as ArgumentsAudited
from align.attention.beside import Beside
from align.collectives.audit import Audited as CollectivesAudited
from align.compare.tensors import TensorComparison
from align.compare.tokens import TokenComparison
from align.conditions import Condition
from align.findings import Finding
from align.ledger.sides import Audited
from align.run.plan import SideExtras
from align.run.recordings import Recording
from align.run.stability import Stability
from align.run.verdict import Verdict
from align.sentences import Said
from align.walk.alone import Alone
from align.walk.diagnosis import Diagnosis
from align.walk.recovery import TransplantResult


@dataclass(frozen=True)
class Move:
    """One stage that was entered, with what was known when it ended.

    Attributes:
        stage: its name.
        conditions, tensors, findings, transplants: as in :class:`Report`.
    """

    stage: str
    conditions: tuple[Condition, ...] = ()
    tensors: TensorComparison | None = None
    findings: tuple[Finding, ...] = ()
    transplants: tuple[TransplantResult, ...] = ()


@dataclass
class Report:
    """A joint run, or a comparison of two traces.

    Attributes:
        verdict: ``not comparable`` until there is another.
        reason: what stopped the comparison; empty if nothing did. With a finding that explains it the verdict is that.
        reason_told: the same as a sentence, where whoever stopped it made one.
        extras: by side, what it alone ran with: patches and options.
        conditions: as judged last.
        stability: of each side.
        fresh: how well a fresh engine repeats a side's first run, of the sides that were tried so.
        comparisons: of tokens, by mode (``free``, ``replay``).
        tensors: of tensors; ``None`` if none were recorded.
        findings: what is wrong, the headline first.
        transplants: what transplants showed, that of the headline first.
        min_coverage: percent of the checkpoints without which nothing is called aligned; ``None`` if none was demanded.
        surplus: rows by role that a side computed ahead of what was asked for; they have no partner, and need none.
        alone: what the request that shows the headline does by itself; ``None`` if it was not tried.
        diagnosis: the headline's checkpoint against float64; ``None`` if there is none, or no values of it.
        ledgers: by side, what the audit of its cache indices found; empty if it was not reached.
        collectives: by side with several ranks, what the audit of its collectives found.
        arguments: by side, what the rules say of the arguments of attention and cache operators.
        beside: the attention calls of both sides, argument by argument; empty if they were not recorded.
        recordings: by side, what was compared consists of.
        remarks: what the user should know about how the recordings were given.
        bytes: written by each side's last capture.
        seconds: by stage.
        moves: stages in the order in which they ended; one that came again is there again.
    """

    verdict: Verdict = "not comparable"
    reason: str = ""
    reason_told: Said | None = None
    extras: dict[str, SideExtras] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    stability: tuple[Stability, ...] = ()
    fresh: tuple[Stability, ...] = ()
    comparisons: dict[str, TokenComparison] = field(default_factory=dict)
    tensors: TensorComparison | None = None
    findings: tuple[Finding, ...] = ()
    transplants: tuple[TransplantResult, ...] = ()
    min_coverage: float | None = None
    surplus: dict[str, int] = field(default_factory=dict)
    alone: Alone | None = None
    diagnosis: Diagnosis | None = None
    ledgers: dict[str, Audited] = field(default_factory=dict)
    collectives: dict[str, CollectivesAudited] = field(default_factory=dict)
    arguments: dict[str, ArgumentsAudited] = field(default_factory=dict)
    beside: tuple[Beside, ...] = ()
    recordings: dict[str, Recording] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to its stage, and the stage to the moves."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started
            self.moves.append(Move(stage, self.conditions, self.tensors, self.findings, self.transplants))

    @property
    def tainted(self) -> tuple[Condition, ...]:
        """Conditions that do not hold and were allowed: the verdict rests on them."""
        return tuple(condition for condition in self.conditions if condition.taints)
