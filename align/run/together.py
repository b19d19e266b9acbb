"""What data-parallel groups did while others worked: idle groups, and the forwards that they made in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adapters.base import RunResult
from align.trace.reader import Trace


@dataclass(frozen=True)
class Together:
    """The common forwards of one run, of an engine whose groups step together.

    Attributes:
        cycles: how many there were.
        dummies: by rank, how many of them it made without requests.
        lengths: of those, in tokens, each once.
        split: cycles in which some groups' rows were prompts and others' were not; the engine then runs all of them as
            a prefill, which is information.
        torn: cycles that the engine itself ran as a prefill on one rank and as a decode on another.
    """

    cycles: int
    dummies: Mapping[str, int]
    lengths: tuple[int, ...]
    split: tuple[int, ...]
    torn: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def together(result: RunResult) -> Together | None:
    """What the steps of a run say of it; ``None`` where groups do not step together."""
    phases: dict[int, set[str]] = {}
    modes: dict[int, set[str]] = {}
    dummies: dict[str, int] = {}
    lengths: set[int] = set()
    for step in (*result.steps, *result.dummies):
        if step.cycle is None:
            continue
        phases.setdefault(step.cycle, set()).update([step.phase] if step.phase else [])
        modes.setdefault(step.cycle, set()).add(step.mode)
        if step.dummy:
            name = f"rank {step.rank}"
            dummies[name] = dummies.get(name, 0) + 1
            lengths.add(step.tokens)
    if not modes:
        return None
    return Together(
        cycles=len(modes),
        dummies=dummies,
        lengths=tuple(sorted(lengths)),
        split=tuple(sorted(cycle for cycle, found in phases.items() if len(found) > 1)),
        torn=tuple(sorted(cycle for cycle, found in modes.items() if len(found) > 1)),
    )


def torn_remarks(results: Mapping[str, RunResult | None]) -> tuple[str, ...]:
    """Of sides whose ranks did not agree whether a common forward was a prefill."""
    found = []
    for role, result in results.items():
        one = None if result is None else together(result)
        if one is not None and one.torn:
            cycles = ", ".join(map(str, one.torn))
            found.append(
                f"the ranks of the {role} did not agree whether they prefill or decode, in common forward {cycles}: "
                "they may take different collectives there"
            )
    return tuple(found)


def idle_remarks(traces: Mapping[str, Trace]) -> tuple[str, ...]:
    """Of data-parallel groups that no request was for: they are not compared."""
    found = []
    for role, trace in traces.items():
        for group in trace.idle_groups:
            ranks = [rank for rank in trace.ranks if trace.group_of(rank) == group]
            dummies = [entry for entry in trace.steps(ranks[0]) if entry.dummy] if ranks else []
            lengths = sorted({entry.tokens for entry in dummies})
            if not dummies:
                did = "it made no forward, because this engine's groups do not wait for each other"
            else:
                forwards = "1 dummy forward" if len(dummies) == 1 else f"{len(dummies)} dummy forwards"
                tokens = " or ".join(map(str, lengths))
                did = f"it kept in step by {forwards} of {tokens} token{'' if lengths == [1] else 's'}"
            found.append(f"data-parallel rank {group} of the {role} had no request and was idle: {did}, not compared")
    return tuple(found)
