"""A night: every case of a plan in turn, each in a process of its own, so that one that fails leaves the others.

A night that was killed goes on: what a case came to is in the store when its run has ended, and a case that has nothing
there is run from its beginning, in a new directory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from align.history.changes import changes, found_in
from align.history.plan import Plan, PlannedCase
from align.history.store import NOT_COMPARABLE, Night, Outcome, Store
from align.result.schema import Result

#: A night that began longer ago is not gone on with: versions and machines have changed since.
GOES_ON = timedelta(hours=20)


@dataclass(frozen=True)
class Ended:
    """The run of a case.

    Attributes:
        directory: of the run.
        result: ``None`` if it left none.
        reason: why there is none; empty if there is one.
        seconds: it took.
    """

    directory: Path
    result: Result | None
    reason: str
    seconds: float


#: Runs a case into a directory that does not exist yet.
Runner = Callable[[PlannedCase, Path], Ended]


def sha256_of(plan: Plan) -> str:
    """Of what a plan runs."""
    text = json.dumps([asdict(one) for one in plan.cases] + [plan.minutes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def open_night(plan: Plan, store: Store, now: datetime, fresh: bool = False) -> Night:
    """The night of this plan that was begun and not ended, or a new one.

    Args:
        now: with its offset from UTC.
        fresh: a new one in any case.
    """
    sha256 = sha256_of(plan)
    nights = store.nights(plan.name)
    last = nights[-1] if nights else None
    unended = last is not None and not last.ended and last.sha256 == sha256
    if last is not None and unended and not fresh and now - datetime.fromisoformat(last.started) < GOES_ON:
        return last
    return store.begin(plan.name, sha256, now)


def run_night(
    plan: Plan, night: Night, store: Store, directory: Path, runner: Runner, say: Callable[[str], None]
) -> tuple[Outcome, ...]:
    """Run the cases of a night that are not done yet, and end it.

    Args:
        directory: of the night; each case has one below ``cases``.
        say: hears what each case came to.
    """
    done = {one.case for one in store.outcomes(night)}
    for number, case in enumerate(plan.cases, 1):
        if case.name in done:
            say(f"{number}/{len(plan.cases)} {case.name}: done already")
            continue
        say(f"{number}/{len(plan.cases)} {case.name}: running")
        outcome = outcome_of(case, runner(case, _fresh(directory / "cases" / case.folder)), store, night)
        store.add(night, outcome)
        say(f"{number}/{len(plan.cases)} {case.name}: {told(outcome)}")
    if not night.ended:
        store.end(night, datetime.now().astimezone())
    return store.outcomes(night)


def outcome_of(case: PlannedCase, ended: Ended, store: Store, night: Night) -> Outcome:
    """What a case came to, beside the nights before."""
    result = ended.result
    earlier = store.last(night, case.name, comparable=True)
    last = store.last(night, case.name)
    found = None if result is None else found_in(result)
    # The first night of a case has none before it, so that all its findings are new.
    known = () if earlier is None else earlier[1].findings
    verdict = NOT_COMPARABLE if result is None else result.verdict
    return Outcome(
        case=case.name,
        verdict=verdict,
        reason=ended.reason if result is None else result.reason if verdict == NOT_COMPARABLE else "",
        case_sha256="" if result is None or result.case is None else result.case.sha256,
        seconds=round(ended.seconds, 1),
        directory=str(ended.directory),
        versions={} if result is None else result.versions,
        findings=found or (),
        changed=changes(known, found) if found is not None else (),
        earlier=0 if earlier is None else earlier[0],
        failed_before=last is not None and not last[1].comparable,
    )


def told(outcome: Outcome) -> str:
    """In one line."""
    if not outcome.comparable:
        return f"NOT COMPARABLE{' as before' if outcome.failed_before else ''}: {outcome.reason}"
    counts = ", ".join(
        f"{len(found)} {state}" for state in ("new", "moved", "known", "fixed") if (found := outcome.of(state))
    )
    return f"{outcome.verdict}{f' ({counts})' if counts else ''}, {outcome.seconds:.0f} s"


def _fresh(place: Path) -> Path:
    """A directory that no earlier try of the case wrote into: its engines may still be ending."""
    place.parent.mkdir(parents=True, exist_ok=True)
    number, free = 1, place
    while free.exists():
        number += 1
        free = place.with_name(f"{place.name}-{number}")
    return free


def remove_old(plan: Plan, store: Store, directory_of: Callable[[Night], Path]) -> list[Night]:
    """Remove the run directories of all nights but the last ones; what the store knows of them stays."""
    removed = []
    for night in store.nights(plan.name)[: -plan.keep]:
        cases = directory_of(night) / "cases"
        if cases.is_dir():
            shutil.rmtree(cases)
            removed.append(night)
    return removed
