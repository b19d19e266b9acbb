"""Every environment that is there or should be: its state, who builds it, and who runs from it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envs import lockfile
from envs.build import MARKER, NAMES, Builder
from envs.errors import EnvError
from envs.installed import Departure, departures

#: ``unfinished``: a build was stopped, or the base interpreter is gone.
State = Literal["built", "building", "unfinished", "absent"]

PROC = Path("/proc")


@dataclass(frozen=True)
class Found:
    """One environment.

    Attributes:
        name: ``driver``, ``lmdeploy`` or ``vllm``.
        key: the 12 hexadecimal digits in the directory's name.
        path: its directory, which need not exist.
        current: of the lock of this checkout; another checkout may still need the others.
        state: see :data:`State`.
        holder: process that is building it, if known.
    """

    name: str
    key: str
    path: Path
    current: bool
    state: State
    holder: int | None = None


def survey(builder: Builder, names: Iterable[str] = NAMES) -> tuple[Found, ...]:
    """The current environments ``names``, then those of other locks.

    Raises:
        EnvError: a damaged lock.
    """
    wanted = [builder.environment(name) for name in names]
    current = (Found(one.name, one.key[:12], one.path, True, *_state(one.path, one.ready)) for one in wanted)
    return (*current, *others(builder))


def others(builder: Builder) -> tuple[Found, ...]:
    """Environments of other locks than this checkout's.

    Raises:
        EnvError: a damaged lock: what is current is not known then.
    """
    current = {builder.environment(path.stem).path for path in sorted(builder.locks.glob("*.toml"))}
    found = []
    for path in builder.directories():
        if path not in current:
            name, _, key = path.name.rpartition("-")
            ready = (path / MARKER).is_file() and (path / "bin" / "python").exists()
            found.append(Found(name, key, path, False, *_state(path, ready)))
    return tuple(found)


def _state(path: Path, ready: bool) -> tuple[State, int | None]:
    if ready:
        return "built", None
    locked, holder = build_under_way(path)
    if locked:
        return "building", holder
    return ("unfinished" if path.exists() else "absent"), None


def build_under_way(path: Path) -> tuple[bool, int | None]:
    """Whether somebody holds the lock of an environment's directory, and the process that does, if known."""
    try:
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False, None
    except OSError as error:
        hint = f"make it readable: chmod u+rw {path}.lock"
        raise EnvError(f"cannot read {path}.lock: {error.strerror or error}", hint) from error
    try:
        # Shared, and given back at once: a builder that comes in between tries again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, None
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return True, int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)


def departures_of(builder: Builder, name: str) -> tuple[Departure, ...]:
    """What the built environment ``name`` holds that is not what its lock says.

    Raises:
        EnvError: a damaged lock.
    """
    lock = lockfile.load(name, builder.locks)
    removed = [path for step in lock.steps for path in step.remove]
    return departures(builder.environment(name).site_packages, lock.versions, removed)


def users(paths: Iterable[Path], proc: Path = PROC) -> dict[Path, tuple[int, ...]]:
    """Processes that run from each directory: named on their command line, or a library of it in their memory.

    A process that changed its command line, as Ray's workers do, is known by its libraries. Those of other users
    cannot be looked at.
    """
    needles = {path: os.fsencode(path) + b"/" for path in paths}
    found: dict[Path, list[int]] = {path: [] for path in needles}
    for entry in sorted((one for one in proc.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name)):
        text = b""
        for file in ("cmdline", "maps"):
            with suppress(OSError):  # it has just ended, or is somebody else's
                text += (entry / file).read_bytes() + b"\n"
        for path, needle in needles.items():
            if needle in text:
                found[path].append(int(entry.name))
    return {path: tuple(pids) for path, pids in found.items()}


def size(path: Path) -> int:
    """Bytes that a directory takes on its disk; links are not followed, and what vanishes meanwhile is not counted."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
