"""What an examination is given, what it is measured against, and what it answers."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from envs.build import Builder

#: ``missing``: a run cannot succeed. ``warning``: it can, but not every run, or more slowly. ``unknown``: not seen.
State = Literal["ok", "missing", "warning", "unknown"]


@dataclass(frozen=True)
class Check:
    """The answer to one question about this machine.

    Attributes:
        name: of the question.
        state: see :data:`State`.
        found: what was found, in a few words.
        mend: the command that mends it; empty if nothing is to be mended, or if nobody can know.
    """

    name: str
    state: State
    found: str
    mend: str = ""

    def __post_init__(self) -> None:
        assert self.mend or self.state in ("ok", "unknown"), f"{self.name}: nothing is said to mend it"


@dataclass(frozen=True)
class Needs:
    """What a run needs. Sizes are in bytes.

    Measured on two cores with Ray 2.60.0: ``qwen3`` takes 2.4 GB of memory (PSS) and 302 threads, with TP 2 4.0 GB and
    406 threads, ``smollm2`` 6.0 GB; no process opens more than 129 files. Directories of runs had 40 to 455 MB.

    Attributes:
        run_disk_least, run_disk: free space where runs are kept, for a small run and for one with all its values.
        temporary_disk: free space for Ray's session.
        memory_least, memory: available memory for ``qwen3`` and for ``smollm2``.
        shared_memory: size of ``/dev/shm``: Ray's object store (100 MB) and the queues between vLLM's workers.
        files_least, files: open files per process; below the second Ray warns.
        threads_least, threads: further threads of this user.
        socket_directory: characters of the temporary directory's path: vLLM's workers add 37 to it, and the path of a
            Unix socket ends at 107 (unix(7)).
        full: part of a disk or of the memory in use from which on Ray refuses objects, or kills workers (its
            ``local_fs_capacity_threshold`` and ``memory_usage_threshold``).
    """

    run_disk_least: int = 200_000_000
    run_disk: int = 2_000_000_000
    temporary_disk: int = 500_000_000
    memory_least: int = 2_500_000_000
    memory: int = 6_500_000_000
    shared_memory: int = 128_000_000
    files_least: int = 256
    files: int = 4096
    threads_least: int = 320
    threads: int = 600
    socket_directory: int = 70
    full: float = 0.95


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no file can be made in any of the usual places; the examination says why
        return Path(os.environ.get("TMPDIR") or "/tmp")


@dataclass(frozen=True)
class Machine:
    """Where to look; tests put their own in place.

    Attributes:
        builder: of the environments; its home is ``ALIGN_HOME``.
        device: ``simnpu`` or ``ascend``.
        environ: environment variables of the command.
        temporary: directory of temporary files.
        short_temporary: where a run's own directory goes if the path of that is too long.
        prefix: of the interpreter that this command runs in.
        proc, cgroup, shm: mount points of the kernel's file systems.
        pid: this process.
        uid: its user; 0 is not bound by the limit on processes.
    """

    builder: Builder = field(default_factory=Builder)
    device: str = "simnpu"
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    temporary: Path = field(default_factory=_temporary)
    short_temporary: Path = Path("/tmp")
    prefix: Path = field(default_factory=lambda: Path(sys.prefix))
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    pid: int = field(default_factory=os.getpid)
    uid: int = field(default_factory=os.getuid)

    @property
    def home(self) -> Path:
        """``ALIGN_HOME``."""
        return self.builder.home


#: Answers one or more questions. What it raises becomes an ``unknown``; what it yielded before that stays.
Examination = Callable[[Machine, Needs], Iterator[Check]]


def gb(size: float) -> str:
    """Bytes for people, as in ``2.5 GB``, ``64 MB`` or ``4 kB``."""
    if size >= 1e8:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
