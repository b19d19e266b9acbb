"""The conditions of a comparison: those that are not ok, and how many are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adapters.base import SIDES
from align.conditions import Condition
from align.run.outcome import Outcome

_SHOWN_VALUE = 40
#: Settings worth a line where no condition is defined, by the name that adapters give them.
_SETTINGS = ("dtype", "tp", "block_size", "eager", "prefix_caching", "soc_version", "numerics")
_STYLES = {"ok": "green", "false": "red", "unknown": "yellow"}


def show_conditions(console: Console, conditions: Sequence[Condition], verbose: bool = False) -> None:
    """A row per condition that is not ok (``verbose``: per condition), and the count of the others."""
    if not conditions:
        return
    ok = sum(condition.ok for condition in conditions)
    shown = [condition for condition in conditions if verbose or not condition.ok]
    if shown:
        table = Table(title="conditions", title_justify="left", box=None, pad_edge=False)
        for column in ("condition", "requested", *SIDES, "verdict", "why"):
            table.add_column(column, overflow="fold")
        for condition in shown:
            table.add_row(
                Text(condition.name),
                _cell(condition.requested),
                *(_cell(condition.observed.get(side)) for side in SIDES),
                Text(_verdict(condition), style=_STYLES[condition.verdict]),
                Text("" if condition.ok and not verbose else condition.why),
            )
        console.print(table)
    console.print(
        f"conditions: {ok} of {len(conditions)} read back and ok", highlight=False, style=None if shown else "dim"
    )


def show_settings(console: Console, outcome: Outcome) -> None:
    """What was read back, where no condition could be judged."""
    table = Table(title="read back from the engines", title_justify="left", box=None, pad_edge=False)
    for column in ("setting", *outcome.sides):
        table.add_column(column)
    for name in _SETTINGS:
        row = []
        for side in outcome.sides.values():
            seen = [observation for observation in side.observations if observation.name == name]
            row.append(_cell(seen[-1].value if seen else None, "unknown"))
        table.add_row(name, *row)
    console.print(table)


def _verdict(condition: Condition) -> str:
    if condition.ok:
        return condition.verdict
    if not condition.required:
        return "noted"  # it informs, whatever it is
    return f"{condition.verdict}, allowed" if condition.taints else condition.verdict


def _cell(value: object, absent: str = "not observable") -> Text:
    text = absent if value is None else str(value)
    return Text(text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…")
