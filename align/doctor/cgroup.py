"""Limits of the control groups of this process (a container's), in both versions that Linux has."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Version 1 says "no limit" by a number near the largest that fits into 64 bits.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Limit:
    """A limit and what is in use of it (memory without the cache that can be given back)."""

    most: int
    used: int

    @property
    def left(self) -> int:
        """What may still be taken."""
        return max(0, self.most - self.used)


def memory(proc: Path, cgroup: Path) -> Limit | None:
    """In bytes; ``None`` if there is no limit."""
    found = [
        *_limits(proc, cgroup, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        *_limits(proc, cgroup, "", "memory.max", "memory.current"),
    ]
    return min(
        (Limit(limit.most, max(0, limit.used - _cache(folder))) for folder, limit in found),
        key=lambda limit: limit.left,
        default=None,
    )


def pids(proc: Path, cgroup: Path) -> Limit | None:
    """Of processes and threads; ``None`` if there is no limit."""
    found = [
        *_limits(proc, cgroup, "pids", "pids.max", "pids.current"),
        *_limits(proc, cgroup, "", "pids.max", "pids.current"),
    ]
    return min((limit for _, limit in found), key=lambda limit: limit.left, default=None)


def _limits(proc: Path, cgroup: Path, controller: str, most: str, used: str) -> list[tuple[Path, Limit]]:
    """The limits of the group of this process and of those above it; ``controller`` is empty for version 2."""
    place = _place(proc, controller)
    found = []
    # In a container the path may be the host's, while the mount shows the container's own group at its root.
    for folder in {cgroup / controller / part for part in (place, *place.parents)}:
        limit, current = _number(folder / most), _number(folder / used)
        if limit is not None and current is not None and limit < _UNLIMITED:
            found.append((folder, Limit(limit, current)))
    return found


def _place(proc: Path, controller: str) -> Path:
    """Path of the group of this process, relative to the mount point."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return Path(path.lstrip("/"))
    return Path()


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # ValueError: it says "max"
        return int(path.read_text(encoding="ascii"))
    return None


def _cache(folder: Path) -> int:
    """Bytes of files that nobody used lately: they are given back when memory is short."""
    with suppress(OSError):
        values = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
    return 0
