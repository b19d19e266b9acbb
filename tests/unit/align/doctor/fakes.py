"""A machine that is made of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.doctor.types import Machine
from envs.build import Builder
from tests.unit.envs.fakes import LOCK, FakePip, write_lock

NAMES = ("driver", "lmdeploy", "vllm")


def machine(root: Path, **changes: Any) -> Machine:
    """Three tiny locks, an empty home, an empty ``/proc``; nothing of the real machine."""
    root.mkdir(exist_ok=True)
    for name in NAMES:
        write_lock(root / "locks", LOCK.replace("tiny", name), name)
    for folder in ("proc/self", "cgroup", "shm", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {
        "builder": Builder(root / "home", root / "locks", FakePip()),
        "environ": {},
        "temporary": root / "tmp",
        "short_temporary": root / "tmp",
        "prefix": root / "elsewhere",
        "proc": root / "proc",
        "cgroup": root / "cgroup",
        "shm": root / "shm",
    }
    return Machine(**{**given, **changes})


def process(
    proc: Path,
    pid: int,
    argv: str,
    *,
    parent: int = 1,
    mark: str = "",
    writes: str = "",
    state: str = "S",
    uid: int = 1000,
    threads: int = 1,
) -> None:
    """One process of a fake ``/proc``; ``argv`` is split at spaces, ``writes`` is an open file."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a name) {state} {parent} {pid} {pid} 0 -1\n")
    (folder / "cmdline").write_text("\0".join(argv.split()) + "\0")
    (folder / "environ").write_text("HOME=/home/user\0" + (f"ALIGN_RUN_ID={mark}\0" if mark else ""))
    (folder / "fd").mkdir()
    if writes:
        (folder / "fd" / "0").symlink_to("/dev/null")
        (folder / "fd" / "7").symlink_to(writes)
    (folder / "status").write_text(f"Name:\ta: name\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nThreads:\t{threads}\n")
