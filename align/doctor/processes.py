"""The processes of this machine at one moment, as far as they may be seen."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from align.run.guardian import MARK

#: What the temporary directory of a run is called (:class:`align.run.guard.Guard`).
PREFIX = "align-"
_SESSION = re.compile(rf"(/.*/{PREFIX}[^/]+)/session_")
_WRITE = 0o200


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        pid, parent: numbers.
        argv: its command line, which it may have replaced by a title.
        run_id: mark of the run that started it; empty if it has none, or cannot be looked at.
        session: temporary directory of a run in which it writes a file of Ray's session; empty if none. Ray's agents
            write their titles over the mark, and are known by their logs.
    """

    pid: int
    parent: int
    argv: tuple[str, ...]
    run_id: str
    session: str = ""


def processes(proc: Path) -> dict[int, Process]:
    """All that run now, by number; those that have ended and are not collected yet do not count."""
    found = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                process = _read(entry)
                if process is not None:
                    found[process.pid] = process
    return found


def _read(entry: Path) -> Process | None:
    # The command name is in parentheses and may hold spaces.
    state, parent = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
    if state in "ZX":
        return None
    argv = tuple(part.decode(errors="replace") for part in (entry / "cmdline").read_bytes().split(b"\0") if part)
    environ: list[bytes] = []
    with suppress(PermissionError):  # somebody else's
        environ = (entry / "environ").read_bytes().split(b"\0")
    mark = f"{MARK}=".encode()
    run_id = next(
        (value.removeprefix(mark).decode(errors="replace") for value in environ if value.startswith(mark)), ""
    )
    return Process(int(entry.name), int(parent), argv, run_id, _session(entry / "fd"))


def _session(descriptors: Path) -> str:
    with suppress(OSError):  # somebody else's
        for one in descriptors.iterdir():
            with suppress(OSError):  # just closed
                found = _SESSION.match(os.readlink(one))
                # The link's own mode says how the file was opened: who only reads a log does not belong to the run.
                if found and os.lstat(one).st_mode & _WRITE:
                    return found[1]
    return ""


def ancestors(process: Process, among: dict[int, Process]) -> Iterator[Process]:
    """Its parent, the parent's parent and so on, as far as they can be seen."""
    seen = {process.pid}
    while process.parent in among and process.parent not in seen:
        process = among[process.parent]
        seen.add(process.pid)
        yield process


def with_descendants(roots: Iterable[int], among: dict[int, Process]) -> list[int]:
    """Numbers of ``roots`` and of all that they started and that still hangs on them, sorted."""
    family = set(roots)
    grown = True
    while grown:
        below = {process.pid for process in among.values() if process.parent in family} - family
        family |= below
        grown = bool(below)
    return sorted(family)
