"""From judged conditions to going on or stopping."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from align.conditions.table import NAMES
from align.conditions.types import Condition
from align.errors import UserError
from align.sentences import said

_SHOWN = 60


def require_names(allow: Collection[str]) -> None:
    """Check the names given to ``--allow``.

    Raises:
        UserError: a name that no condition has; lists those that exist.
    """
    unknown = sorted(set(allow) - set(NAMES))
    if unknown:
        raise UserError(
            f"no condition is called {', '.join(unknown)}",
            f"--allow takes one of: {', '.join(NAMES)}",
        )


def blocking(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions that stop the comparison: required, false or unreadable, and not allowed."""
    return tuple(condition for condition in conditions if condition.blocks)


def refuse(conditions: Sequence[Condition]) -> None:
    """Stop if a condition demands it.

    Raises:
        UserError: every condition that blocks, with what was requested and observed; the mends are the hint.
    """
    found = blocking(conditions)
    if not found:
        return
    lines = [describe(condition) for condition in found]
    mends = list(dict.fromkeys(f"{condition.name}: {condition.mend}" for condition in found))
    allow = " ".join(f"--allow {condition.name}" for condition in found)
    what = "a condition does not hold" if len(found) == 1 else f"{len(found)} conditions do not hold"
    raise UserError(
        "\n  ".join([f"{what}:", *lines]),
        "\n  ".join([*mends, f"or go on in spite of it: {allow}"]),
        said("stopped.conditions", names=[condition.name for condition in found]),
    )


def describe(condition: Condition) -> str:
    """One line: which condition, requested, observed on which side."""
    sides = "; ".join(
        f"{side} {shown(value) if value is not None else 'not observable'}"
        for side, value in condition.observed.items()
    )
    return f"{condition.name} is {condition.verdict}: requested {shown(condition.requested)}, {sides} ({condition.why})"


def shown(value: Any) -> str:
    """A value as people read it, cut to one line."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
