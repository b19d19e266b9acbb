"""The directories that are written to: there, writable, and with enough space."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from align.doctor.types import Check, Machine, Needs, gb
from envs import lockfile
from envs.build import NAMES


def examine_home(machine: Machine, needs: Needs) -> Iterator[Check]:
    """``ALIGN_HOME``, and the space for the environments that are still to be built."""
    home = machine.home
    wrong = unusable(home)
    other = "ALIGN_HOME=/path make align"
    if wrong:
        yield Check("ALIGN_HOME", "missing", f"{home}: {wrong}", other)
        return
    if os.statvfs(existing(home)).f_flag & os.ST_NOEXEC:
        found = f"{home}: its disk is mounted noexec, so no interpreter starts there"
        yield Check("ALIGN_HOME", "missing", found, other)
    else:
        yield Check("ALIGN_HOME", "ok", str(home) if home.is_dir() else f"{home} (made when it is needed)")
    names = NAMES if machine.device == "simnpu" else ("driver",)
    absent = [name for name in names if not machine.builder.environment(name).ready]
    needed = sum(lockfile.load(name, machine.builder.locks).disk_mb for name in absent) * 1_000_000
    yield space_to_build(free(home), needed, absent)


def space_to_build(available: int, needed: int, absent: list[str]) -> Check:
    """Args: free bytes, bytes that building needs, and the environments to build."""
    if not absent:
        return Check("disk to build", "ok", f"{gb(available)} free, all environments are built")
    found = f"{gb(available)} free, building {', '.join(absent)} needs {gb(needed)}"
    if available < needed:
        return Check("disk to build", "missing", found, "ALIGN_HOME=/path/on/another/disk make env")
    return Check("disk to build", "ok", found)


def examine_runs(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Where runs are kept unless ``--out`` says otherwise."""
    runs = machine.home / "runs"
    wrong = unusable(runs)
    if wrong:
        yield Check("runs", "missing", f"{runs}: {wrong}", "align run --out /path/of/a/new/directory")
    else:
        yield space_to_run(free(runs), needs)


def space_to_run(available: int, needs: Needs) -> Check:
    """Args: free bytes where runs are kept."""
    mend = "align run --out /path/on/another/disk"
    if available < needs.run_disk_least:
        return Check("disk to run", "missing", f"{gb(available)} free, a run needs {gb(needs.run_disk_least)}", mend)
    if available < needs.run_disk:
        found = f"{gb(available)} free, a run that keeps all values takes up to {gb(needs.run_disk)}"
        return Check("disk to run", "warning", found, mend)
    return Check("disk to run", "ok", f"{gb(available)} free")


def examine_temporary(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Ray's session and the engines' sockets are there."""
    folder = machine.temporary
    mend = "TMPDIR=/path make align"
    wrong = unusable(folder)
    usage = shutil.disk_usage(existing(folder))
    if wrong:
        yield Check("temporary files", "missing", f"{folder}: {wrong}", mend)
    elif usage.free < needs.temporary_disk:
        found = f"{gb(usage.free)} free in {folder}, {gb(needs.temporary_disk)} are needed"
        yield Check("temporary files", "missing", found, mend)
    elif usage.used > needs.full * (usage.used + usage.free):
        found = f"the disk of {folder} is more than {needs.full:.0%} full: Ray may refuse to store objects"
        yield Check("temporary files", "warning", found, mend)
    elif len(str(folder)) > needs.socket_directory:
        found = f"{folder} is too long for the sockets of several ranks"
        yield Check("temporary files", "warning", found, "TMPDIR=/tmp make align")
    else:
        yield Check("temporary files", "ok", f"{gb(usage.free)} free in {folder}")


def existing(path: Path) -> Path:
    """The path itself or the nearest directory above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def free(path: Path) -> int:
    """Bytes that may be written below ``path``, which need not exist."""
    return shutil.disk_usage(existing(path)).free


def unusable(path: Path) -> str:
    """Why files cannot be made and locked in a directory, which need not exist yet; empty if they can."""
    place = existing(path)
    if not place.is_dir():
        return f"{place} is no directory"
    try:
        # It has no name in the directory, so that nothing is left however this process ends.
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""
