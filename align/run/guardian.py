"""A small process that outlives the driver and ends what the driver started.

Run as ``python guardian.py RUN_ID DRIVER_PID TEMP_DIR``. Its standard input is a pipe whose other end only the driver
holds, so end-of-file means that the driver is done, or dead, however it died. Then every process whose environment
carries the run's mark, and whatever such a process started, is asked to stop, and killed :data:`GRACE_SECONDS` later;
last, the temporary directory goes.

Only the standard library is used and nothing of this project is imported: it must start fast and work when all else is
broken.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

#: Environment variable that marks every process of a run.
MARK = "ALIGN_RUN_ID"
#: Between asking and killing. With the driver dead, all its processes are gone GRACE_SECONDS + 2 seconds later.
GRACE_SECONDS = 3.0
_SWEEPS_AFTER_KILL = 20
_POLL_SECONDS = 0.1
#: Between two looks at the family while the driver lives: Ray's own processes end with the driver, before there is time
#: to see what they had started.
_WATCH_SECONDS = 1.0


def marked(run_id: str, but: frozenset[int] = frozenset()) -> list[int]:
    """Processes of this machine whose environment at start carried the mark of ``run_id``; zombies are not counted."""
    wanted = f"{MARK}={run_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in but:
            continue
        # A process may end while it is looked at, and others' processes may not be read.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
            if wanted in environ.read().split(b"\0"):
                found.append(int(name))
    return found


def _stat(pid: int) -> tuple[str, int, str]:
    """``(state, parent, start time)`` of a process.

    Raises:
        OSError: it is gone.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The command name is in parentheses and may hold spaces.
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[1]), fields[19]


class Family:
    """The marked processes of a run and all that they started.

    A process that writes its title over its environment, as Ray's agents do, loses the mark. It is known as a
    descendant of a marked one, and stays known when its parent has ended.
    """

    def __init__(self, run_id: str, but: frozenset[int] = frozenset()) -> None:
        self._run_id, self._but = run_id, but
        self._known: dict[int, str] = {}

    def living(self) -> list[int]:
        """Those that run now; zombies do not count."""
        seen: dict[int, tuple[str, int, str]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    seen[int(name)] = _stat(int(name))
        roots = set(marked(self._run_id, self._but)) | {
            pid for pid, start in self._known.items() if pid in seen and seen[pid][2] == start
        }
        grown = True
        while grown:
            below = {pid for pid, (_, parent, _) in seen.items() if parent in roots} - roots - self._but
            grown = bool(below)
            roots |= below
        self._known.update({pid: seen[pid][2] for pid in roots if pid in seen})
        return sorted(pid for pid in roots if pid in seen and seen[pid][0] not in "ZX")


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(run_id: str, but: frozenset[int] = frozenset(), grace: float = GRACE_SECONDS) -> list[int]:
    """End all processes of a run; returns those that even SIGKILL did not end."""
    return end(Family(run_id, but), grace)


def end(family: Family, grace: float = GRACE_SECONDS) -> list[int]:
    """End a family; returns those that even SIGKILL did not end."""
    _signal(family.living(), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and family.living():
        time.sleep(_POLL_SECONDS)
    left = family.living()
    for _ in range(_SWEEPS_AFTER_KILL):
        if not left:
            break
        _signal(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        left = family.living()
    return left


def _is_closed(pipe: int, seconds: float) -> bool:
    """Whether the other end of a pipe was closed; waits for that for a while."""
    readable = select.select([pipe], [], [], seconds)[0]
    return bool(readable) and not os.read(pipe, 4096)


def main() -> int:
    run_id, driver, temp_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # Ctrl-C in a terminal reaches the whole foreground group; this process must stay to clean up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    family = Family(run_id, but=frozenset({os.getpid(), driver}))
    while not _is_closed(sys.stdin.fileno(), _WATCH_SECONDS):
        family.living()
    left = end(family)
    shutil.rmtree(temp_dir, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
