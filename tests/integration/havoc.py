"""Breaking things on purpose: faults for processes and disks, and a count of what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from align.run.resume import whole_traces

_SAMPLE_SECONDS = 0.5
_ATTEMPTS = 100
_PIECES = (1 << 20, 4096, 1)


class NotPermittedError(Exception):
    """This user, or this machine, may not do what the fault needs."""


class Census:
    """Every process of a command: what carries its mark, and whatever descends from it.

    A sampling thread keeps those that lose the mark, or their parent, on the way. A context manager.

    Args:
        root: the command's process.
        mark: ``NAME=value`` in the environment that the command was started with.
    """

    def __init__(self, root: int, mark: str) -> None:
        self._mark = mark.encode()
        self._known: dict[int, float] = {root: psutil.Process(root).create_time()}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            self.living()

    def living(self) -> list[psutil.Process]:
        """Those that run now; zombies hold nothing and do not count."""
        seen: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                seen[process.pid] = process
        members = {pid for pid, born in self._known.items() if pid in seen and seen[pid].create_time() == born}
        members |= {pid for pid in seen if self._mark in _environ(pid)}
        grown = True
        while grown:
            more = {pid for pid, process in seen.items() if pid not in members and _parent(process) in members}
            members |= more
            grown = bool(more)
        self._known.update({pid: seen[pid].create_time() for pid in members})
        return [seen[pid] for pid in sorted(members) if _runs(seen[pid])]

    def one(self, *words: str, environ: str = "") -> psutil.Process:
        """The process whose command line holds all ``words``, and whose environment the entry.

        Raises:
            AssertionError: there is none, or more than one.
        """
        found = [
            process
            for process in self.living()
            if all(word in _line(process) for word in words)
            and (not environ or environ.encode() in _environ(process.pid))
        ]
        assert len(found) == 1, (
            f"{words} {environ}: {[_line(one) for one in found]} of {list(map(_line, self.living()))}"
        )
        return found[0]

    def wait_until_gone(self, seconds: float) -> list[str]:
        """Wait at most ``seconds``; returns what is left."""
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{process.pid} {_line(process)}" for process in left]


def _environ(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return 0


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


# ------------------------------------------------------------------------------------------------------------ disks


def _mount(*arguments: str) -> None:
    """Mount.

    Raises:
        NotPermittedError: it is not allowed here.
    """
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotPermittedError(f"mounting is not permitted here: {done.stderr.strip()}")


def _unmount(path: Path) -> None:
    """Lazily, so that nothing which is still open there keeps it."""
    subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own, which can be filled.

    Raises:
        NotPermittedError: mounting is not permitted.
    """
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(path))
    try:
        yield path
    finally:
        _unmount(path)


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No byte is free on the disk of ``path``, until the end."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in _PIECES:
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    assert os.statvfs(path).f_bavail == 0
    try:
        yield
    finally:
        filler.unlink()


def _make_read_only(path: Path) -> None:
    """As soon as nothing is being written through this mount."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(NotPermittedError):
            return _mount("-o", "remount,bind,ro", str(path))
        time.sleep(0.01)
    return _mount("-o", "remount,bind,ro", str(path))


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Nothing below ``path`` can be written, until the end. Files that are open already stay writable: a second mount
    lies over the first, which could not be made read-only while they are.

    Raises:
        NotPermittedError: mounting is not permitted.
    """
    _mount("--bind", str(path), str(path))
    try:
        _make_read_only(path)
        yield
    finally:
        _unmount(path)


# ------------------------------------------------------------------------------------------------------------ files


def half_files(folder: Path) -> list[str]:
    """Files below ``folder`` whose names say that they are whole, and which are not; ``.tmp`` says the contrary."""
    found = []
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not file.is_file():
            continue
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                _require_whole(file)
            elif file.name == "report.md" and not file.read_text(encoding="utf-8").endswith("\n"):
                raise ValueError("it breaks off")
        except (OSError, ValueError) as error:
            found.append(f"{file}: {error}")
    return found


def _require_whole(file: Path) -> None:
    """The format says how long its file is.

    Raises:
        ValueError: it is shorter or longer.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
    if file.stat().st_size != 8 + length + end:
        raise ValueError(f"{file.stat().st_size} bytes instead of {8 + length + end}")


def traces_taken(run: Path) -> bool:
    """Whether what a run left would be judged without the engines."""
    return bool(whole_traces(run)[0])
