"""What earlier runs left: processes whose driver is gone, and directories of Ray's sessions.

A run cleans up after itself, also when it is killed; this is for the day on which its guardian was killed too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from align.doctor.processes import PREFIX, Process, ancestors, processes, with_descendants
from align.doctor.types import Check, Machine, Needs, gb
from align.run import guardian
from envs import survey

_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """The processes of one run.

    Attributes:
        run_id: its mark.
        pids: marked processes and what they started.
        driver: process of its command, or ``None`` if that is gone.
        guarded: its guardian lives, and ends the processes once the driver is gone.
    """

    run_id: str
    pids: tuple[int, ...]
    driver: int | None
    guarded: bool


def runs(among: dict[int, Process]) -> list[Run]:
    """Every run that has processes, in the order of their marks; without any mark left, of their sessions."""
    guardians = {one.argv[3]: one for one in among.values() if _is_guardian(one)}
    marks = {guard.argv[5]: run_id for run_id, guard in guardians.items()}
    marks |= {one.session: one.run_id for one in among.values() if one.session and one.run_id}
    members: dict[str, list[Process]] = {}
    for process in among.values():
        run_id = process.run_id or marks.get(process.session, process.session)
        if run_id:
            members.setdefault(run_id, []).append(process)
    return [_run(run_id, found, guardians.get(run_id), among) for run_id, found in sorted(members.items())]


def _run(run_id: str, members: list[Process], guard: Process | None, among: dict[int, Process]) -> Run:
    driver = int(guard.argv[4]) if guard is not None and int(guard.argv[4]) in among else _driver(members, among)
    pids = with_descendants([process.pid for process in members], among)
    return Run(run_id, tuple(pids), driver, guard is not None)


def _is_guardian(process: Process) -> bool:
    """``python -S guardian.py RUN_ID DRIVER_PID TEMP_DIR``."""
    argv = process.argv
    script = PurePath(guardian.__file__).name
    return len(argv) == 6 and PurePath(argv[2]).name == script and argv[4].isdecimal()


def _driver(members: list[Process], among: dict[int, Process]) -> int | None:
    """Without a guardian: a Python without the mark that is above the run's processes, or writes into its session.

    Another collector of orphans that is written in Python is taken for a driver, so that nothing is said about what
    hangs on it: better than the advice to kill a living run.
    """
    for process in members:
        for one in (process, *ancestors(process, among)):
            # Ray's agents, which lost their mark, have a title instead of a command line.
            runs_python = bool(one.argv) and PurePath(one.argv[0]).name.startswith("python")
            # Process 1 collects orphans, whatever it is written in; in a container it may be the command itself.
            if runs_python and not one.run_id and (one.pid != 1 or "align" in one.argv):
                return one.pid
    return None


def examine_processes(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Runs that have processes now."""
    yield earlier_runs(runs(processes(machine.proc)))


def earlier_runs(found: Iterable[Run]) -> Check:
    """Leftovers are a warning: they take memory and time, and stop nothing."""
    found = list(found)
    left = [run for run in found if run.driver is None and not run.guarded]
    if left:
        pids = sorted({pid for run in left for pid in run.pids})
        who = "a run whose command is gone" if len(left) == 1 else f"{len(left)} runs whose commands are gone"
        text = f"{len(pids)} process{'es' if len(pids) > 1 else ''} of {who}"
        # Not asked politely: the driver that would collect what they have is gone, and Ray's do not go then.
        return Check("earlier runs", "warning", text, f"kill -9 {' '.join(map(str, pids))}")
    living = [run for run in found if run.driver is not None]
    if living:
        drivers = ", ".join(str(run.driver) for run in living)
        return Check("earlier runs", "ok", f"nothing left; in progress: process {drivers}")
    if found:
        return Check("earlier runs", "ok", "one was stopped, and its guardian is ending its processes")
    return Check("earlier runs", "ok", "no process left")


def examine_sessions(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Temporary directories of runs; one that a living process names or writes in is in use."""
    living = processes(machine.proc).values()
    words = "\0".join(word for process in living for word in (*process.argv, process.session))
    places = dict.fromkeys((machine.temporary, machine.short_temporary))
    old = [path for place in places for path in sessions(place) if str(path) not in words]
    yield left_sessions(old)


def sessions(place: Path) -> list[Path]:
    """Directories of runs that Ray used, below a directory of temporary files."""
    found = [path for path in place.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink()]
    return sorted(path for path in found if any(path.glob("session_*")))


def left_sessions(old: list[Path]) -> Check:
    """Args: directories that no process uses."""
    if not old:
        return Check("Ray sessions", "ok", "none left")
    shown = ", ".join(map(str, old[:_SHOWN])) + (f" and {len(old) - _SHOWN} more" if len(old) > _SHOWN else "")
    size = gb(sum(survey.size(path) for path in old))
    mend = f"rm -r {' '.join(shlex.quote(str(path)) for path in old)}"
    return Check("Ray sessions", "warning", f"{size} in {shown}", mend)
