"""When a night fails."""

from __future__ import annotations

from collections.abc import Sequence

from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, EXIT_NOT_COMPARABLE, UserError
from align.history.changes import State
from align.history.store import Outcome

#: ``new``: findings that the last comparable night had not, and cases that could be compared and now cannot. ``any``:
#: all findings, and all cases that cannot be compared. ``never``: nothing.
FAIL_ON = ("new", "any", "never")


def fail_on(text: str) -> str:
    """``--fail-on``.

    Raises:
        UserError: another word.
    """
    if text not in FAIL_ON:
        raise UserError(f"--fail-on {text} is not known", f"choose one of {', '.join(FAIL_ON)}")
    return text


def exit_code(outcomes: Sequence[Outcome], policy: str) -> int:
    """1 for findings that count, else 2 for cases that could not be compared and count, else 0."""
    if policy == "never":
        return EXIT_ALIGNED
    counted: tuple[State, ...] = ("new", "moved") if policy == "new" else ("new", "moved", "known", "unknown")
    if any(one.of(*counted) for one in outcomes):
        return EXIT_DIVERGED
    failed = [one for one in outcomes if not one.comparable and (policy == "any" or not one.failed_before)]
    return EXIT_NOT_COMPARABLE if failed else EXIT_ALIGNED
