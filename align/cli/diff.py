"""``align diff``: two runs, and what became of the findings of the first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.cli.output import print_json
from align.cli.screen import screen
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, EXIT_NOT_COMPARABLE
from align.history.changes import Change, changes, found_in
from align.report.read import read_result
from align.result.pair import ran_of
from align.result.schema import Result
from align.run.directory import RESULT
from align.walk.paired import Pair, pair

#: How many other differences are listed.
_LISTED = 8


@dataclass(frozen=True)
class DiffSettings:
    """The options of ``align diff``."""

    before: Path
    after: Path
    json: bool


def execute(settings: DiffSettings) -> int:
    """Print what changed; 1 if something is new or moved, 2 if one of the two is not comparable, else 0.

    Raises:
        UserError: a run that left no result.
    """
    before, after = (_result(path) for path in (settings.before, settings.after))
    found = changes(found_in(before), found_in(after))
    both = pair(ran_of(before), ran_of(after))
    names = [
        path.resolve().name if path.is_dir() else path.resolve().parent.name
        for path in (settings.before, settings.after)
    ]
    code = _code(before, after, found)
    if settings.json:
        print_json(_plain(names, before, after, found, both))
        return code
    console = screen()
    console.say(f"before: {names[0]}: {before.verdict}{f' ({before.reason})' if before.reason else ''}")
    console.say(f"after:  {names[1]}: {after.verdict}{f' ({after.reason})' if after.reason else ''}")
    for one in found:
        console.say(f"{one.state}: {one.found.summary}")
        if one.state == "moved" and one.before is not None:
            console.say(f"  before: {one.before.summary}")
    if not found:
        console.say("no finding in either")
    others = [f"{one.what} {one.name}: {one.before} → {one.after}" for one in both.confounded]
    if others:
        console.say("what else differs between the two, so that a change may come of it:")
        for line in others[:_LISTED]:
            console.say(f"  {line}")
        if len(others) > _LISTED:
            console.say(f"  and {len(others) - _LISTED} more: align diff --json")
    console.say(f"next: {_next(found, code)}")
    return code


def _result(path: Path) -> Result:
    return read_result(path / RESULT if path.is_dir() else path)


def _code(before: Result, after: Result, found: tuple[Change, ...]) -> int:
    if "not comparable" in (before.verdict, after.verdict):
        return EXIT_NOT_COMPARABLE
    return EXIT_DIVERGED if any(one.state in ("new", "moved") for one in found) else EXIT_ALIGNED


def _next(found: tuple[Change, ...], code: int) -> str:
    if code == EXIT_NOT_COMPARABLE:
        return "a run that is not comparable says nothing of findings: mend what it names, and run it again"
    worse = next((one for one in found if one.state in ("new", "moved")), None)
    if worse is not None:
        return f"align explain {worse.found.fault.kind}; then read the later run's report"
    if any(one.state == "known" for one in found):
        return "what is known is still there; nothing came with the later run"
    return "nothing that is left to find"


def _plain(names: list[str], before: Result, after: Result, found: tuple[Change, ...], both: Pair) -> dict[str, Any]:
    return {
        "before": {"run": names[0], "verdict": before.verdict, "reason": before.reason},
        "after": {"run": names[1], "verdict": after.verdict, "reason": after.reason},
        "findings": [one.to_dict() for one in found],
        "differs": [
            {"what": one.what, "name": one.name, "before": one.before, "after": one.after} for one in both.confounded
        ],
        "measures": {
            "added": [f"{one.side} {one.kind} {one.name}" for one in both.added],
            "removed": [f"{one.side} {one.kind} {one.name}" for one in both.removed],
        },
    }
