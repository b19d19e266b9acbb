"""The symptom, derived from the run, and the paths that the seeds' symptom tables suggest for it.

Every row of the tables of seed 000 §2.1 and seed 003 step 4 is answered (:mod:`align.result.symptom_rows`), and every
known problem of seed 000 (:mod:`align.result.symptom_known`): shown, not shown, or not observable in this run, with
what that rests on. What was found wins over what the tables suggest, and
the result says whether they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from align.findings import PATHS
from align.knowledge import knowledge
from align.result.ground import Ground
from align.result.parts import Documented
from align.result.plain import plain
from align.result.symptom_known import known_problems
from align.result.symptom_rows import SHOWN, Seen, answers, nonfinite, repeats, some_of_a_batch, unrelated
from align.run.report import Report
from align.sentences import Said, said, text_of, told


class SymptomRow(Documented):
    """One row of the seeds' symptom tables."""

    row: str
    """Its id, as ``align explain`` takes it."""
    state: Literal["shown", "not shown", "not observable"]
    """Whether this run shows it; not observable is no "not shown"."""
    why: str
    """What that rests on."""
    told: dict[str, Any] = Field(default_factory=dict)
    """The same as data; empty in results of an earlier version."""


class Symptom(Documented):
    """What the trouble looks like, and where the seeds' tables would look for it."""

    names: list[str]
    """The most telling first; empty if nothing was compared."""
    names_told: list[dict[str, Any]] = Field(default_factory=list)
    """The same as data."""
    rows: list[SymptomRow]
    """Every row of the tables of seed 003 step 4, seed 000 §2.1 and its known problems."""
    suggested: list[str]
    """Paths that the rows shown suggest, those that most rows name first."""
    found: list[str]
    """Paths of the findings, the headline's first. They win over what is suggested."""
    agree: bool | None
    """Whether the headline's path is among the suggested; null if there is nothing to agree about."""


def symptom_of(report: Report, ground: Ground) -> Symptom:
    """Of a comparison that ended anyhow."""
    seen = Seen(report, ground)
    rows = [_row(row, state, told(why)) for row, (state, why) in (*answers(seen), *known_problems(seen))]
    suggested = _suggested([one.row for one in rows if one.state == SHOWN])
    found = [path for path in dict.fromkeys(one.path for one in report.findings) if path != "UNLOCATED"]
    names = _names(seen)
    return Symptom.model_validate(
        {
            "names": [text_of(one) for one in names],
            "names_told": names,
            "rows": [one.model_dump() for one in rows],
            "suggested": suggested,
            "found": found,
            "agree": found[0] in suggested if found and suggested else None,
        }
    )


def _row(row: str, state: str, why: Said) -> SymptomRow:
    return SymptomRow.model_validate({"row": row, "state": state, "why": text_of(why), "told": plain(why)})


def _suggested(shown: Sequence[str]) -> list[str]:
    """Paths of the rows that are shown: those that most rows name first."""
    entries = knowledge().entries
    votes: Counter[str] = Counter(path for row in shown if not row.startswith("003-S4-") for path in entries[row].paths)
    order = list(PATHS)
    return sorted((path for path in votes if path != "UNLOCATED"), key=lambda path: (-votes[path], order.index(path)))


def _names(seen: Seen) -> list[Said]:
    """What a person would call it, the most telling first."""
    if not seen.tokens and seen.report.tensors is None and not seen.report.stability:
        return []
    found: list[Said] = []
    if not all(one.stable for one in seen.report.stability):
        found.append(said("named.unstable"))
    if nonfinite(seen)[0] == SHOWN:
        found.append(said("named.nonfinite"))
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        if any(one.kind == "length" and getattr(one, f"{side}_id") is None for one in seen.first.values()):
            found.append(said("named.ends", side=side, other=other))
    if repeats(seen):
        found.append(said("named.repeats"))
    elif unrelated(seen) is not None:
        found.append(said("named.garbled"))
    if seen.first:
        first = min(one.index for one in seen.first.values())
        found.append(said("named.first") if first == 0 else said("named.after", count=first))
        if some_of_a_batch(seen)[0] == SHOWN:
            found.append(said("named.some"))
    elif seen.report.findings:
        found.append(said("named.tokens_agree" if seen.tokens else "named.tensors"))
    return found or ([said("named.no_difference")] if seen.report.verdict == "aligned" else [])
