"""Earlier runs: what each came to, which of them can go on, and how they are removed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from adapters.base import SIDES
from adapters.mistakes import read_mistake
from align.errors import UserError
from align.run.directory import CASE, REQUEST, RunDirectory, disk_error, is_locked
from envs.home import align_home
from envs.survey import size

#: ``interrupted``: stopped from outside, or killed. ``refused``: a condition does not hold, a side does not repeat
#: itself, an option cannot be, or a patch is wrong: another try would meet the same. ``failed``: an engine died, or
#: something else that another try may not meet.
State = Literal["running", "aligned", "diverged", "interrupted", "refused", "failed"]
#: The reason that a run leaves when it is stopped from outside, see ``align.cli.leave``.
INTERRUPTED = "interrupted"
_RESULT, _RECORD, _TOKENS = "result.json", "run.json", "tokens.json"
#: Why ``align resume`` did not go on; beside what the run left, which stays.
_REFUSED = "refused.json"
#: An engine that answers with an exception, whose cause is one side's own options or patches, does so again. Both
#: texts are those of :mod:`align.run.side`.
_ANSWERED, _OWN_CHANGES = re.compile(r"the \w+ \([^)]*\) failed to \w+: "), "leave out "


@dataclass(frozen=True)
class EarlierRun:
    """One run directory.

    Attributes:
        path: absolute.
        started: local time.
        model: as the case names it; empty if there is no case.
        state: see :data:`State`.
        reason: why there is no verdict; empty if there is one, or nothing says why.
        resumable: whether ``align resume`` has what it needs.
    """

    path: Path
    started: datetime
    model: str
    state: State
    reason: str
    resumable: bool

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.path.name

    @property
    def goes_on(self) -> bool:
        """Whether ``align resume`` takes it up by itself: a run that was refused would be refused again."""
        return self.resumable and self.state in ("interrupted", "failed")


def runs_directory() -> Path:
    """Where runs go that are not told where to go."""
    return align_home() / "runs"


def named_run(path: Path) -> Path:
    """What a user calls a run, as a path: the name that ``align runs`` lists, or a part of it (``NAME/candidate``).

    A path that exists wins over a name.
    """
    if path.is_absolute() or path.exists():
        return path
    listed = runs_directory() / path
    return listed if path.parts and ".." not in path.parts and listed.exists() else path


def earlier_runs(place: Path | None = None) -> list[EarlierRun]:
    """Every directory below ``place`` (default: the cache's runs), the newest first. Damaged files are no obstacle.

    Raises:
        UserError: the directory cannot be read.
    """
    place = runs_directory() if place is None else place
    try:
        directories = [entry for entry in place.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}", "make it readable, or set ALIGN_HOME") from error
    return sorted(map(earlier_run, directories), key=lambda run: (run.started, run.name), reverse=True)


def earlier_run(path: Path) -> EarlierRun:
    """What a run directory says of itself."""
    result = _read(path / _RESULT) or _read(path / _RECORD)  # versions before result.json left the record alone
    case = _read(path / CASE)
    state, reason = _state_of(path, result)
    return EarlierRun(
        path=path.absolute(),
        started=_started(path, result),
        model=str(case.get("model", "")),
        state=state,
        reason=reason,
        resumable=(path / REQUEST).is_file() and (path / CASE).is_file(),
    )


def last_run(place: Path | None = None, but: Collection[Path] = ()) -> Path:
    """The newest run that can go on.

    Args:
        but: runs that turned out not to.

    Raises:
        UserError: there is none; says what the newest is.
    """
    place = runs_directory() if place is None else place
    found = earlier_runs(place)
    for run in found:
        if run.goes_on and run.path not in but:
            return run.path
    if not found:
        raise UserError(f"there is no run in {place}", "name the directory of a run: align resume RUN")
    newest = found[0]
    raise UserError(
        f"no run in {place} can go on: the newest, {newest.name}, {_told(newest)}",
        "align runs lists them; name one to take it up all the same: align resume RUN",
    )


def newest_run(place: Path | None = None) -> Path:
    """The newest run that generated tokens, which can be followed, whatever came of it.

    Raises:
        UserError: there is none.
    """
    place = runs_directory() if place is None else place
    for run in earlier_runs(place):
        if run.resumable and run.state != "running" and (run.path / _TOKENS).is_file():
            return run.path
    raise UserError(f"there is no run with tokens in {place}", "name the directory of a run: align replay RUN")


def last_diverged(place: Path | None = None) -> Path:
    """The newest run that diverged.

    Raises:
        UserError: there is none.
    """
    place = runs_directory() if place is None else place
    for run in earlier_runs(place):
        if run.state == "diverged" and run.resumable:
            return run.path
    raise UserError(f"there is no run in {place} that diverged", "name the directory of a run: align reduce RUN")


def note_refusal(directory: RunDirectory, error: UserError) -> None:
    """Keep why a run cannot go on: it is listed as refused from then on. Where nothing can be written, nothing is."""
    with suppress(UserError):
        directory.write_json(_REFUSED, {"reason": error.message, "next": error.hint})


def remove(run: EarlierRun) -> int:
    """Remove a run's directory.

    Returns:
        bytes that it took.

    Raises:
        UserError: another command uses it, or it cannot be told whether one does, or something cannot be removed.
    """
    with closing(RunDirectory.reopen(run.path)) as held:
        if not held.locked:
            raise UserError(
                f"{run.path} may be in use: its file system has no locks", f"remove it by hand: rm -r {run.path}"
            )
        freed = size(run.path)
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            raise disk_error(error, run.path) from error
    return freed


def _told(run: EarlierRun) -> str:
    if run.state in ("aligned", "diverged"):
        return f"has ended: {run.state}"
    if run.state == "running":
        return "is running"
    return f"was refused: {run.reason}" if run.state == "refused" else "is of another version"


def _state_of(path: Path, result: dict[str, Any]) -> tuple[State, str]:
    verdict, reason = result.get("verdict"), str(result.get("reason") or "")
    if is_locked(path):
        return "running", ""
    ladder = result.get("ladder")
    if isinstance(ladder, dict) and ladder.get("conclusion") is None:
        return "interrupted", ""
    if verdict == "aligned":
        return "aligned", ""
    if verdict == "diverged":
        return "diverged", ""
    refusal = _read(path / _REFUSED)
    if refusal:
        return "refused", str(refusal.get("reason") or "")
    if not result or reason in ("", INTERRUPTED):
        return "interrupted", ""
    started = any((path / side).is_dir() for side in SIDES)
    option = not started and reason.startswith("--")
    if option or _not_to_be_compared(result, reason) or _mistaken(path, result, reason):
        return "refused", reason
    return "failed", reason


def _not_to_be_compared(result: dict[str, Any], reason: str) -> bool:
    """Whether a condition ended the run, or a side that does not repeat itself.

    A condition may be false where an engine died before it was asked; then the engine is the reason.
    """
    with suppress(AttributeError, TypeError):
        blocked = any(one.get("blocks") for one in result.get("conditions") or ())
        return (blocked and "not hold" in reason) or any(
            one.get("stable") is False for one in result.get("stability") or ()
        )
    return False


def _mistaken(path: Path, result: dict[str, Any], reason: str) -> bool:
    """Whether an engine ended with what the user has to correct, such as a patch that raised."""
    if not _ANSWERED.match(reason):
        return False
    with suppress(OSError, ValueError, KeyError, TypeError):
        if any(read_mistake(path / side) is not None for side in SIDES):
            return True
    return str(result.get("next") or "").startswith(_OWN_CHANGES)


def _started(path: Path, result: dict[str, Any]) -> datetime:
    """When it began, as it says itself; otherwise when its first file was written."""
    timing = result.get("timing")
    with suppress(TypeError, ValueError, AttributeError):
        return datetime.fromisoformat(timing["started"]).astimezone()  # type: ignore[index]
    for file in (path / REQUEST, path / CASE, path):
        with suppress(OSError):
            return datetime.fromtimestamp(os.stat(file).st_mtime).astimezone()
    return datetime.fromtimestamp(0).astimezone()


def _read(file: Path) -> dict[str, Any]:
    """An object in a file; an empty one if there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
