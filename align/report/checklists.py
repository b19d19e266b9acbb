"""The checklists in the report: counts, what failed, what is not observable and why, and what is ok in short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from align.checklists.table import items, lists
from align.report.markdown import Markdown
from align.result.checklists import Checklist, ChecklistItem
from align.result.schema import Result

Say = Callable[..., Markdown]


@dataclass(frozen=True)
class Group:
    """Items that are not observable for one reason, or whose subject is not in the run.

    Attributes:
        told, what: the reason.
        mend_told, mend: what would make them observable; empty for the others.
        items: with the list that each is of.
    """

    told: Mapping[str, Any]
    what: str
    mend_told: Mapping[str, Any] | None
    mend: str
    items: tuple[tuple[Checklist, ChecklistItem], ...]


#: State → key of its word; troubles are shown or not.
_WORDS = {"ok": "ok", "failed": "failed", "not observable": "hidden", "not applicable": "apart"}
_TROUBLES = {"ok": "not_shown", "failed": "shown"}


def state(name: str, state: str) -> str:
    """Key of the word for a state of an item of a list."""
    words = _WORDS | (_TROUBLES if name == "troubleshooting" else {})
    return f"checklists.{words[state]}"


def title(found: Checklist, lang: str) -> str:
    """A list's name."""
    return lists()[found.name].title.of(lang)


def about(found: Checklist, lang: str) -> str:
    """What a failed item of it means."""
    return lists()[found.name].about.of(lang)


def text(item: ChecklistItem, lang: str) -> str:
    """An item's own text."""
    return items()[item.id].text.of(lang) if item.id in items() else item.id


def of_state(result: Result, *states: str) -> Iterator[tuple[Checklist, ChecklistItem]]:
    """Items in a state, with their lists."""
    return ((one, item) for one in result.checklists for item in one.items if item.state in states)


def groups(result: Result, state: str) -> list[Group]:
    """Items in a state by reason, those of one reason together, in order of the first of them."""
    found: dict[tuple[str, str], list[tuple[Checklist, ChecklistItem]]] = {}
    for one, item in of_state(result, state):
        found.setdefault((item.what, item.mend), []).append((one, item))
    return [
        Group(these[0][1].told, what, these[0][1].mend_told, mend, tuple(these))
        for (what, mend), these in found.items()
    ]


def names(group: Group, lang: str, say: Say) -> Markdown:
    """``000-Q04 sparse_mode fits the phase; 000-Q05 …``."""
    parts = [say("checklists.named", id=item.id, text=text(item, lang)) for _, item in group.items]
    return Markdown(say("label.semicolon").join(parts))


def from_findings(item: ChecklistItem, say: Say) -> Markdown:
    """Which findings it rests on; empty if on none."""
    return say("checklists.from", numbers=list(map(str, item.findings))) if item.findings else Markdown("")
