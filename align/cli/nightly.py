"""``align nightly``: a plan's cases, night after night."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from align.cli.errors import note_next
from align.cli.options import check_supported
from align.cli.output import print_json
from align.cli.screen import Screen, screen
from align.errors import UserError
from align.history.case_run import run_case
from align.history.night import open_night, remove_old, run_night
from align.history.page import junit, page
from align.history.plan import DEFAULT, Plan, read_plan
from align.history.policy import exit_code, fail_on
from align.history.store import Night, Outcome, SqlStore
from align.run.directory import RunDirectory, disk_error
from align.run.plan import SIMULATED
from envs.home import align_home

STORE, INDEX, JUNIT, SUMMARY = "nights.sqlite", "index.html", "junit.xml", "night.json"


@dataclass(frozen=True)
class NightlySettings:
    """The options of ``align nightly``."""

    plan: Path | None
    device: str
    out: Path | None
    fail_on: str
    fresh: bool
    list: bool
    new: Path | None
    json: bool
    quiet: bool


def execute(settings: NightlySettings) -> int:
    """Run a night, or go on with the one that was stopped; the exit code is the policy's.

    Raises:
        UserError: a plan, option or store that cannot be.
    """
    policy = fail_on(settings.fail_on)
    if settings.new is not None:
        return _new(settings.new)
    plan = read_plan(settings.plan or DEFAULT)
    if settings.list:
        return _list(plan, settings)
    check_supported(settings.device)
    console = screen(settings.quiet, settings.json)
    home = (settings.out or align_home() / "nightly" / plan.name.replace(" ", "_")).absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, home) from error
    lock = RunDirectory.reopen(home)  # two nights at once would run the same cases
    store = SqlStore.at(home / STORE)
    try:
        night = open_night(plan, store, datetime.now().astimezone(), settings.fresh)
        place = _place(home, night)
        done = store.outcomes(night)
        if done:
            console.say(f"going on with night {night.number}: {len(done)} of {len(plan.cases)} cases are done")
        runner = partial(run_case, plan, device=settings.device)
        leave = partial(_leave, plan, store, home, settings.device == SIMULATED)

        def say(line: str) -> None:
            console.say(line)
            leave(night)

        try:
            outcomes = run_night(plan, night, store, place, runner, say)
        except BaseException as error:
            if not isinstance(error, Exception):
                note_next(error, "run the same command again: it goes on with the case that was running")
            raise
        night = next(one for one in store.nights(plan.name) if one.number == night.number)
        found = leave(night)
        for old in remove_old(plan, store, partial(_place, home)):
            console.say(
                f"removed the runs of night {old.number} (the plan keeps {plan.keep}; the store has its results)"
            )
    finally:
        store.close()
        lock.close()
    code = exit_code(outcomes, policy)
    if settings.json:
        print_json({**found, "exit": code})
    _show(console, outcomes, place, home)
    if settings.quiet and not settings.json:
        print(f"{_counted(outcomes)}: {place / INDEX}")
    return code


def _place(home: Path, night: Night) -> Path:
    return home / "nights" / f"{night.number:05d}"


def _leave(plan: Plan, store: SqlStore, home: Path, simulated: bool, night: Night) -> dict[str, Any]:
    """Write what a night came to so far, in its directory; copies of the last night's lie beside the store."""
    place, outcomes = _place(home, night), store.outcomes(night)
    before = any(one.number < night.number for one in store.nights(plan.name))
    found = {
        "plan": plan.name,
        "night": night.number,
        "started": night.started,
        "ended": night.ended,
        "simulated": simulated,
        "cases": [_plain(one) for one in outcomes],
        "left": [one.name for one in plan.cases if one.name not in {done.case for done in outcomes}],
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / SUMMARY).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (place / JUNIT).write_text(junit(plan, night, outcomes), encoding="utf-8")
        (place / INDEX).write_text(page(plan, night, outcomes, before, place, simulated), encoding="utf-8")
        (home / INDEX).write_text(page(plan, night, outcomes, before, home, simulated), encoding="utf-8")
        shutil.copyfile(place / JUNIT, home / JUNIT)
    except OSError as error:
        raise disk_error(error, place) from error
    return found


def _plain(one: Outcome) -> dict[str, Any]:
    return {
        "case": one.case,
        "verdict": one.verdict,
        "reason": one.reason,
        "seconds": one.seconds,
        "directory": one.directory,
        "compared_with": one.earlier,
        "findings": [change.to_dict() for change in one.changed],
    }


def _counted(outcomes: Sequence[Outcome]) -> str:
    verdicts = [
        f"{sum(one.verdict == word for one in outcomes)} {word}" for word in ("aligned", "diverged", "not comparable")
    ]
    states = [f"{sum(len(one.of(word)) for one in outcomes)} {word}" for word in ("new", "moved", "known", "fixed")]
    return f"{', '.join(verdicts)}; findings: {', '.join(states)}"


def _show(console: Screen, outcomes: Sequence[Outcome], place: Path, home: Path) -> None:
    console.say(_counted(outcomes))
    for one in outcomes:
        for change in one.of("new", "moved", "fixed"):
            console.say(f"  {change.state}: {one.case}: {change.found.summary}")
        if not one.comparable and not one.failed_before:
            console.say(f"  cannot be compared any more: {one.case}: {one.reason}")
    console.say(f"read: {place / INDEX} (the last night is always {home / INDEX}); for a CI: {home / JUNIT}")


def _list(plan: Plan, settings: NightlySettings) -> int:
    if settings.json:
        print_json({one.name: ["align", "run", *one.arguments] for one in plan.cases})
        return 0
    console = screen(settings.quiet)
    for one in plan.cases:
        console.say(f"{one.name}: align run {' '.join(one.arguments)}")
    console.say(f"{len(plan.cases)} cases")
    return 0


def _new(path: Path) -> int:
    """Write a plan to begin with."""
    if path.exists():
        raise UserError(f"{path} is there already", "give another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DEFAULT, path)
    except OSError as error:
        raise disk_error(error, path) from error
    print(f"{path}: a plan of {len(read_plan(path).cases)} cases; run it: align nightly {path}")
    return 0
