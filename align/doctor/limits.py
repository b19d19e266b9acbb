"""Limits on open files, threads and sizes (``ulimit``, and a container's on threads)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress

from align.doctor import cgroup
from align.doctor.types import Check, Machine, Needs, gb

_UNLIMITED = resource.RLIM_INFINITY


def examine_files(machine: Machine, needs: Needs) -> Iterator[Check]:
    """``ulimit -n``."""
    yield files(*resource.getrlimit(resource.RLIMIT_NOFILE), needs)


def files(soft: int, hard: int, needs: Needs) -> Check:
    """Args: the soft and the hard limit. Ray raises the first to the second."""
    most = max(soft, hard) if _UNLIMITED not in (soft, hard) else _UNLIMITED
    found = f"{_shown(soft)} at most, can be raised to {_shown(hard)}"
    # Only root raises the hard limit.
    mend = f"ulimit -n {2 * needs.files}  # as root; of a container: docker run --ulimit nofile={2 * needs.files} …"
    if most == _UNLIMITED or most >= needs.files:
        return Check("open files", "ok", found)
    if most < needs.files_least:
        return Check("open files", "missing", f"{found}; {needs.files_least} are needed", mend)
    return Check("open files", "warning", f"{found}; Ray recommends {needs.files}", mend)


def examine_threads(machine: Machine, needs: Needs) -> Iterator[Check]:
    """``ulimit -u`` counts the threads of a user, a control group those of a container."""
    limit = cgroup.pids(machine.proc, machine.cgroup)
    if limit is not None:
        yield threads(limit.left, "more in this container", "docker run --pids-limit=4096 …", needs)
        if limit.left < needs.threads:
            return
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == _UNLIMITED or machine.uid == 0:
        if limit is None:
            yield Check("threads", "ok", "no limit")
    else:
        left = max(0, soft - _threads_of(machine))
        if limit is None or left < needs.threads:
            yield threads(left, "more for this user", "ulimit -u 4096", needs)


def threads(left: int, which: str, mend: str, needs: Needs) -> Check:
    """Args: threads that may still be started."""
    found = f"{left} {which}"
    if left < needs.threads_least:
        return Check("threads", "missing", f"{found}; a run needs {needs.threads_least}", mend)
    if left < needs.threads:
        return Check("threads", "warning", f"{found}; a run with several ranks takes {needs.threads}", mend)
    return Check("threads", "ok", found)


def _threads_of(machine: Machine) -> int:
    count = 0
    for entry in machine.proc.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                lines = (entry / "status").read_text(encoding="utf-8", errors="replace").splitlines()
                fields = dict(line.split(":", 1) for line in lines if ":" in line)
                if fields["Uid"].split()[0] == str(machine.uid):
                    count += int(fields["Threads"])
    return count


def examine_sizes(machine: Machine, needs: Needs) -> Iterator[Check]:
    """``ulimit -v`` and ``ulimit -f``."""
    yield sizes(resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0], needs)


def sizes(address_space: int, file: int, needs: Needs) -> Check:
    """Args: bytes of memory that one process may map, and of a file that it may write."""
    found, mend = [], []
    if address_space != _UNLIMITED:
        # torch and Ray map far more than they use: their libraries alone are some gigabytes.
        found.append(f"a process may map {gb(address_space)}, which may be too little")
        mend.append("ulimit -v unlimited")
    if file != _UNLIMITED and file < needs.run_disk:
        found.append(f"a file may have {gb(file)}")
        mend.append("ulimit -f unlimited")
    if found:
        return Check("limits", "warning", ", ".join(found), "; ".join(mend))
    return Check("limits", "ok", "none on memory and files of a process")


def _shown(limit: int) -> str:
    return "unlimited" if limit == _UNLIMITED else str(limit)
