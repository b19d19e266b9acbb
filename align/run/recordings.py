"""What recordings consist of, and whether all of it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from align.compare.rows import Recorded


@dataclass(frozen=True)
class Recording:
    """One side.

    Attributes:
        ranks: that left records.
        steps: forwards of ranks that served requests; each has records of its own.
        dummies: forwards of ranks that served none; of these nothing is compared.
        damaged: what cannot be read, and why.
    """

    ranks: tuple[int, ...]
    steps: int
    dummies: int = 0
    damaged: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "ranks": list(self.ranks), "damaged": list(self.damaged)}


def recordings_of(traces: Mapping[str, Recorded]) -> dict[str, Recording]:
    """By role."""
    return {role: _of(trace) for role, trace in traces.items()}


def _of(trace: Recorded) -> Recording:
    steps = dummies = 0
    damaged = [f"{path} {why}" for path, why in getattr(trace, "unreadable", {}).items()]
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            if entry.dummy:
                dummies += 1
                continue
            steps += 1
            try:
                trace.keys(rank, entry.step)
            except Exception as error:  # whatever is wrong with one file
                damaged.append(str(error))
    return Recording(tuple(trace.ranks), steps, dummies, tuple(dict.fromkeys(damaged)))
