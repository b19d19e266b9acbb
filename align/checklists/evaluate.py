"""The checklists of a finished result: a pure function of it, so that they are evaluated anew from ``result.json``."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from align.checklists import alignment, quick, troubleshooting
from align.checklists.fa import FaFacts, fa_facts
from align.checklists.facts import Answer, Facts
from align.checklists.table import Item, items, lists
from align.result.checklists import Checklist, ChecklistItem, State
from align.result.plain import plain
from align.result.schema import Result
from align.sentences import said, text_of

#: In the order in which counts are shown.
STATES: tuple[State, ...] = get_args(State)


def with_checklists(result: Result) -> Result:
    """The result with its lists, evaluated anew."""
    return result.model_copy(update={"checklists": evaluate(result, fa_facts(result))})


def evaluate(result: Result, fa: FaFacts | None = None) -> list[Checklist]:
    """All items of all lists.

    Args:
        fa: what was recorded of attention's calls; ``None`` where nothing was.
    """
    facts = Facts(result, fa)
    found = {name: [_item(one, answer(one, facts)) for one in items().values() if one.list == name] for name in lists()}
    return [Checklist(name=name, counts=_counts(these), items=these) for name, these in found.items()]


def answer(item: Item, facts: Facts) -> Answer:
    """What came of one item."""
    if item.list == "quick":
        return quick.JUDGES[item.id](facts, item)
    judges = alignment.JUDGES if item.list == "alignment" else troubleshooting.JUDGES
    return judges[item.id](facts)


def _item(item: Item, came: Answer) -> ChecklistItem:
    mend = said(item.mend) if came.state == "not observable" else None
    return ChecklistItem(
        id=item.id,
        number=item.number,
        state=came.state,
        count=came.count,
        what=text_of(came.what),
        told=plain(came.what),
        findings=list(came.findings),
        mend="" if mend is None else text_of(mend),
        mend_told=mend,
    )


def _counts(found: list[ChecklistItem]) -> dict[str, int]:
    counts = Counter(one.state for one in found)
    return {state: counts[state] for state in STATES}
