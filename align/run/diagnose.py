"""The headline's checkpoint recomputed in float64 and its error explained, with what was recorded of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from align.checkpoints.table import parse
from align.compare.rows import Recorded, keys_of, ranks_of, real_steps
from align.compare.tensors import TensorComparison
from align.errors import UserError
from align.findings import Finding
from align.run.judge import one_thread
from align.sentences import raw, said
from align.walk.diagnosis import Diagnosis, diagnose
from align.walk.planner import accused_name, headline_of

#: Findings that a recomputation says something about.
_KINDS = ("operator", "weights", "unexplained", "nonfinite", "configuration")


def diagnose_headline(
    findings: Sequence[Finding],
    tensors: TensorComparison | None,
    recordings: Sequence[Mapping[str, Recorded]],
) -> tuple[tuple[Finding, ...], Diagnosis | None]:
    """Diagnose the first finding that an operator can explain.

    Args:
        recordings: traces by role; of several the first that kept the checkpoint's values counts.

    Returns:
        The findings, the headline with what was found, and that; unchanged and ``None`` if there is nothing to
        recompute, or no recording kept values.
    """
    name = accused_name(findings, tensors)
    headline = None if name is None else headline_of(findings, name)
    if name is None or headline is None or headline.kind not in _KINDS or parse(name).kind.integer:
        return tuple(findings), None
    for traces in recordings:
        if not all(_keeps(trace, name) for trace in traces.values()):
            continue
        try:
            with one_thread():
                found = diagnose(name, headline.side, traces)
        except (UserError, ValueError) as error:
            why = error.message if isinstance(error, UserError) else str(error)
            found = Diagnosis(name, "", None, said("oracle.not_made", why=raw(why)))
        told = replace(
            headline,
            side=headline.side or found.side,
            evidence={**headline.evidence, "oracle": _short(found)},
        )
        return tuple(told if one is headline else one for one in findings), found
    return tuple(findings), None


def _keeps(trace: Recorded, name: str) -> bool:
    """Whether a recording kept a checkpoint's values."""
    return any(name in keys_of(trace, ranks_of(trace, entry.step)[0], entry.step) for entry in real_steps(trace))


def _short(found: Diagnosis) -> dict[str, Any]:
    """What a finding's evidence says of it; the whole is in the result."""
    return {
        "why": found.why,
        "told": found.told,
        "side": found.side,
        "fault": found.kind,
        "text": found.fits[0].text if found.fits else "",
        "ratio": {role: one.to_dict()["ratio"] for role, one in found.sides.items()},
        "verdict": {role: one.verdict for role, one in found.sides.items()},
        "bit_equal": {role: one.bit_equal for role, one in found.sides.items()},
        "channels": list(found.channels),
        "channels_total": found.channels_total,
        "channels_of": found.channels_of,
        "heads": list(found.heads),
    }
