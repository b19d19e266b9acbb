"""Which method each side chose to bring tokens to the experts, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from align.compare.rows import Recorded, leaders

#: The methods in words.
_WORDS = {"all_gather": "all-gather", "mc2": "dispatch and combine (MC2)", "all_to_all": "all-to-all"}


def methods(trace: Recorded) -> dict[str, dict[str, int]]:
    """Phase → method → in how many steps of the first rank of each group; empty for dense models and single ranks."""
    layout = trace.manifest.get("layout") or {}
    if int(layout.get("tp", 1)) * int(layout.get("dp", 1)) == 1:
        return {}
    found: dict[str, Counter[str]] = {}
    for rank in leaders(trace):
        for entry in trace.steps(rank):
            if not entry.dummy and entry.experts:
                found.setdefault(entry.phase, Counter())[str(entry.experts.get("method") or "unknown")] += 1
    return {phase: dict(counts) for phase, counts in found.items()}


def sent_notes(traces: Mapping[str, Recorded]) -> tuple[str, ...]:
    """One for each side with experts on several ranks."""
    found = []
    for role, trace in traces.items():
        parts = [
            f"{_WORDS.get(method, method)} in {count} {phase} step{'' if count == 1 else 's'}"
            for phase, counts in methods(trace).items()
            for method, count in counts.items()
        ]
        if parts:
            found.append(f"the {role} brings tokens to the experts by {', '.join(parts)}")
    return tuple(found)
