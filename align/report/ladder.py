"""What the terminal and the report say of a ladder: one line a rung, what each accused engine says of itself, and the
conclusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from align.knowledge import knowledge
from align.ladder.types import Ladder, Ran
from align.layout import Layout
from align.result.climbed import own_text
from align.result.pair import fault_said
from align.result.schema import Result
from align.sentences import Said, raw, text_of

#: Dimension that introduces a fault → group of files of :mod:`align.knowledge`.
_TO_READ = {"tp": "parallel", "dp": "parallel", "ep": "experts"}


def say(console: Console, quiet: bool, text: str) -> None:
    """A line of progress."""
    if not quiet:
        console.print(f"[bold]ladder[/bold]: {escape(text)}", highlight=False, soft_wrap=True)


def show_plan(console: Console, planned: Sequence[Layout], notes: Sequence[Said]) -> None:
    """What will be walked, and why it begins there."""
    console.print()
    say(console, False, f"{' → '.join(map(str, planned))}; it stops at the first that diverges")
    for note in notes:
        say(console, False, text_of(note))


def came_to(ran: Ran) -> str:
    """A verdict with its reason."""
    if ran.why:
        return f"{ran.verdict}: {ran.why.splitlines()[0]}"
    return ran.verdict if ran.headline is None else f"{ran.verdict}: {ran.headline.short}"


def show_ladder(console: Console, ladder: Ladder) -> None:
    """The end: one line a rung."""
    console.print()
    for line in _lines(ladder):
        say(console, False, line)


def short(ladder: Ladder) -> Iterator[str]:
    """The end in few lines: what it came to."""
    for own in ladder.own:
        yield f"ladder: {own_text(own)}"
    if ladder.conclusion is not None:
        yield f"ladder: {ladder.conclusion.sentence}"


def _lines(ladder: Ladder) -> Iterator[str]:
    width = max((len(str(one.layout)) for one in ladder.ran), default=0)
    for one in ladder.ran:
        where = one.directory or "this run"
        marks = ", inserted: one dimension at a time" if one.cause == "inserted" else ""
        yield f"{one.layout!s:<{width}}  {came_to(one)}  ({where}{marks})"
    ran = {one.layout for one in ladder.ran}
    for layout in ladder.planned:
        if layout not in ran:
            yield f"{layout!s:<{width}}  not run: a simpler one diverges"
    for own in ladder.own:
        yield own_text(own)
    if ladder.conclusion is not None:
        yield ladder.conclusion.sentence


# -------------------------------------------------------------------------------------------------------- the report


def lines(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of the report's words with what fills them; nothing if no ladder was walked."""
    ladder = result.ladder
    if ladder is None:
        return
    if ladder.conclusion is None:
        yield "ladder.open", {"target": ladder.target}
    else:
        yield "ladder.said", {"what": ladder.conclusion.told or raw(ladder.conclusion.sentence)}
    dimension = None if ladder.conclusion is None else ladder.conclusion.dimension
    if dimension is not None:
        yield "ladder.read", {"files": list(knowledge().groups[_TO_READ[dimension]].files)}
    for own in ladder.own:
        yield "ladder.own", {"what": own.told, "directory": own.directory}
    for note in ladder.notes:
        yield "ladder.note", {"what": note}


def introduced(result: Result) -> Said | None:
    """Which dimension introduces the fault, if a ladder says it."""
    conclusion = None if result.ladder is None else result.ladder.conclusion
    return None if conclusion is None or conclusion.dimension is None else conclusion.told or raw(conclusion.sentence)


def rows(result: Result) -> Iterator[dict[str, Any]]:
    """The rungs for the report's table: ``layout``, ``verdict``, ``what`` as a sentence, ``directory``."""
    ladder = result.ladder
    if ladder is None:
        return
    for one in ladder.rungs:
        yield {
            "layout": one.layout,
            "verdict": one.verdict,
            "what": raw(one.why) if one.why else None if one.fault is None else fault_said(one.fault),
            "directory": one.directory,
            "seconds": result.timing.rungs.get(one.directory),
        }
    ran = {one.layout for one in ladder.rungs}
    for layout in ladder.planned:
        if layout not in ran:
            yield {"layout": layout, "verdict": "not run", "what": None, "directory": "", "seconds": None}
