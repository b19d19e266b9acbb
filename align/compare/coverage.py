"""How much of what a model has was seen: checkpoints observed of checkpoints expected, on a side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from math import floor
from typing import Any

from align.compare.gather import is_head
from align.compare.rows import Recorded, keys_of, ranks_of, real_steps
from align.trace.format import POSITIONS, TOKEN_DIGEST, TOKEN_IDS, WORST_RESIDUAL, StepEntry, checkpoint_of


@dataclass(frozen=True)
class Coverage:
    """Checkpoints observed of those expected.

    Attributes:
        expected: how many the model has.
        observed: how many were recorded in every step, values or digest, on every rank.
        missing: names that were recorded nowhere, in order.
        partial: names that some step or rank lacks, in order.
        why: name → reason, where the recorder gave one.
    """

    expected: int
    observed: int
    missing: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    why: tuple[tuple[str, str], ...] = ()

    @property
    def percent(self) -> float:
        """0 to 100; of nothing it is 0."""
        return 100.0 * self.observed / self.expected if self.expected else 0.0

    @property
    def lacking(self) -> tuple[str, ...]:
        """What was not observed in every step and rank."""
        return (*self.missing, *self.partial)

    def reaches(self, demanded: float) -> bool:
        """Whether it is at least ``demanded`` percent, as written; nothing expected reaches 0 alone."""
        # 39.52 is less than what a float makes of it: 247 of 625 are 39.52 %, and must reach them.
        return 100 * self.observed >= Fraction(str(demanded)) * max(self.expected, 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "percent": self.percent}


def percent_text(percent: float) -> str:
    """Rounded down to two decimals, so that 100 is said of the whole alone."""
    return f"{floor(round(100.0 * percent, 6)) / 100.0:.5g}"


def recorded_names(trace: Recorded) -> set[str]:
    """Checkpoints of which any step holds a value or a digest."""
    found: set[str] = set()
    for entry in real_steps(trace):
        for rank in ranks_of(trace, entry.step):
            found |= _seen(keys_of(trace, rank, entry.step), entry)
    return found


def _seen(keys: frozenset[str], entry: StepEntry) -> set[str]:
    """What a step holds of; a lean recording digests no row in some steps, and judges the operators in all."""
    marks = (TOKEN_DIGEST,) if entry.digested is None else (TOKEN_DIGEST, WORST_RESIDUAL)
    seen = {checkpoint_of(key) for key in keys if "#" not in key or key.endswith(marks)} | set(entry.noted)
    return seen - {TOKEN_IDS, POSITIONS}


def cover(trace: Recorded, expected: tuple[str, ...]) -> Coverage:
    """What a side recorded of the expected names."""
    everywhere: set[str] | None = None
    anywhere: set[str] = set()
    why: dict[str, str] = {}
    heads = {name for name in expected if is_head(name)}
    for entry in real_steps(trace):
        kept = [_seen(keys_of(trace, rank, entry.step), entry) for rank in ranks_of(trace, entry.step)]
        some: set[str] = set().union(*kept)
        # Logits are sampled on some ranks only, and a step may sample none.
        whole = set.intersection(*kept) | (heads & some) | (set() if entry.logits_rows else heads)
        everywhere = whole if everywhere is None else everywhere & whole
        anywhere |= some
        for name, reason in entry.failures.items():
            why.setdefault(name, reason)
    complete = (everywhere or set()) & anywhere
    return Coverage(
        expected=len(expected),
        observed=sum(name in complete for name in expected),
        missing=tuple(name for name in expected if name not in anywhere),
        partial=tuple(name for name in expected if name in anywhere and name not in complete),
        why=tuple((name, why[name]) for name in expected if name in why),
    )
