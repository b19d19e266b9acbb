"""The tables of a finding of the ledger: the requests of the step, and the blocks before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from align.report.indices import is_fault
from align.report.markdown import Markdown
from align.report.reach import Claim
from align.result.parts import Finding

#: Rows of a block beside the accused one, and rows that changed or lack what they need, that are shown at most.
BESIDE, CHANGED = 3, 12
Say = Callable[..., Markdown]


@dataclass(frozen=True)
class Block:
    """A block's rows of interest: the accused one with its neighbours, and what changed or is lost.

    Attributes:
        role: ``block`` in question, or ``home``: where what was written elsewhere belongs.
        accused: the slot that is marked, or else the block's first.
        written: whether it is about a write, and not about what attention reads.
        rows: of the evidence; ``left`` more have neither changed nor lost anything, ``like`` more have.
    """

    role: str
    number: int
    accused: int
    written: bool
    rows: tuple[dict[str, Any], ...]
    left: int
    like: int

    @property
    def title(self) -> str:
        """Key of the sentence above it."""
        return f"indices.{self.role}" if self.role == "block" or self.written else "indices.home_read"


def blocks(finding: Finding) -> list[Block]:
    """Those that the finding is about, the one in question first."""
    return [one for role in ("block", "home") if (one := _block(finding, role)) is not None]


def _block(finding: Finding, role: str) -> Block | None:
    rows: list[dict[str, Any]] = list(finding.evidence.get(role) or ()) if is_fault(finding) else []
    if not rows:
        return None
    accused = [at for at, row in enumerate(rows) if row["accused"]]
    near = {at for one in accused for at in range(one - BESIDE, one + BESIDE + 1)}
    touched = [at for at, row in enumerate(rows) if row["before"] != row["after"] or row.get("lost")]
    chosen = sorted({*near, *touched[:CHANGED]} & set(range(len(rows)))) or list(range(min(len(rows), CHANGED)))
    like = len(set(touched) - set(chosen))
    slot = rows[accused[0] if accused else 0]["slot"]
    shown = tuple(rows[at] for at in chosen)
    written = finding.evidence.get("handed_to") != "attention"
    return Block(role, rows[0]["slot"] // len(rows), slot, written, shown, len(rows) - len(chosen) - like, like)


def mark(row: dict[str, Any]) -> str:
    """``→`` for the slot in question, ``✗`` where a token that is needed is not."""
    return " ".join(sign for sign, name in (("→", "accused"), ("✗", "lost")) if row.get(name))


def cell(owner: str, say: Say) -> str:
    """Who wrote a slot: ``r1 position 7`` in the report's words."""
    name, found, position = owner.rpartition(" position ")
    return say("indices.owner", names=name, position=position) if found else owner


def should(row: dict[str, Any], say: Say) -> Markdown:
    """Whose place a slot is by the block tables; several have the same position of a prefix in common."""
    parts: list[Markdown] = []
    for needed in (True, False):
        at: dict[int, list[str]] = {}
        for one in row.get("should", ()):
            if one["needed"] is needed:
                at.setdefault(one["position"], []).append(one["request"])
        key = "indices.owner" if needed else "indices.later"
        parts += [
            say(key, names=Markdown(say("label.list").join(names)), position=position) for position, names in at.items()
        ]
    return Markdown(say("label.semicolon").join(parts)) if parts else Markdown("–")


def notes(finding: Finding, found: Sequence[Block]) -> list[Claim]:
    """What the marks and names in the rows mean, as far as they occur."""
    rows = [row for one in found for row in one.rows]
    told: list[Claim] = [("indices.lost", {})] if any(row.get("lost") for row in rows) else []
    if finding.evidence.get("doubted"):
        told.append(("indices.doubted", {"request": finding.evidence["doubted"]}))
    runs = any("(run " in row[when] for row in rows for when in ("before", "after"))
    return [*told, ("indices.names", {})] if runs else told


def shared(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Blocks that several requests have because they begin alike."""
    return [str(block) for block in sorted({one for row in rows for one in row["table"][: row.get("shared", 0)]})]


def cached(row: dict[str, Any], say: Say) -> Markdown:
    """What a request of the batch had in the cache before the step."""
    start, hit = row["start"], min(row["hit"], row["start"])
    if not start:
        return Markdown("–")
    if not hit:
        return span(0, start, say)
    return say("indices.hit" if hit == start else "indices.part_hit", last=start - 1, hit=hit - 1)


def span(start: int, end: int, say: Say) -> Markdown:
    """Positions from ``start`` up to and without ``end``."""
    if end - start == 1:
        return say("indices.one", position=start)
    return say("indices.span", first=start, last=end - 1)


def batch(finding: Finding, prompts: dict[str, int]) -> list[dict[str, Any]]:
    """The requests of the step in which it showed first; ``prompt``: tokens of a request's prompt, if that is known."""
    rows = finding.evidence.get("batch") or () if is_fault(finding) else ()
    return [{**row, "prompt": prompts.get(row["request"].partition(" (run ")[0])} for row in rows]
