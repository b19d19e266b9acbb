"""The directory of one run: everything that is needed to understand and to repeat it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from align.errors import UserError


def disk_error(error: OSError, path: Path) -> UserError:
    """An error of the file system as a sentence with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"no space is left where {path} is written"
        return UserError(message, "free disk space there, or choose --out elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"{path} cannot be written: {error.strerror}", "choose a writable directory with --out")
    return UserError(f"{path} cannot be written: {error.strerror or error}", "choose another directory with --out")


CASE, REQUEST = "case.json", "request.json"
RUN, TOKENS, RESULT = "run.json", "tokens.json", "result.json"
#: Longer than somebody holds a lock who only looks whether it is held.
_MOMENT = 0.05


class RunDirectory:
    """``case.json``, ``request.json``, ``run.json``, ``tokens.json``, and one directory per side.

    While it is in use it is locked, as long as this process lives: two commands never write into one directory.

    Args:
        path: a directory that does not exist yet or is empty; ``None`` makes one below ``runs``.
        runs: where directories without a name of their own go.
        label: part of a made name, such as the model.

    Raises:
        UserError: the directory holds something already, another command uses it, or it cannot be made.
    """

    def __init__(self, path: Path | None, runs: Path, label: str) -> None:
        made = path is None
        if path is None:
            stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
            path = runs / f"{stamp}-{label}"
        self.path = path.absolute()
        self._made = False
        try:
            self._make(unique=made)
            self._lock = _locked(self.path)
        except OSError as error:
            raise disk_error(error, self.path) from error

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """A directory that an earlier command made.

        Raises:
            UserError: it is not there, or another command is using it.
        """
        found = cls.__new__(cls)
        found.path, found._made = path.absolute(), True
        try:
            found._lock = _locked(found.path)
        except OSError as error:
            raise disk_error(error, found.path) from error
        return found

    @property
    def locked(self) -> bool:
        """Whether others are kept out; not where the file system has no locks."""
        return self._lock is not None

    def close(self) -> None:
        """Let others use it. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self, keep: Collection[str]) -> None:
        """Remove everything but the files named.

        Raises:
            UserError: something cannot be removed.
        """
        try:
            for entry in self.path.iterdir():
                if entry.name not in keep:
                    _remove(entry)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _make(self, unique: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        base, number = self.path, 1
        while True:
            try:
                self.path.mkdir()
                self._made = True
                return
            except FileExistsError:
                if not unique:
                    if self.path.is_dir() and not any(self.path.iterdir()):
                        return
                    raise UserError(f"{self.path} is not an empty directory", _occupied(self.path)) from None
                number += 1
                self.path = base.with_name(f"{base.name}-{number}")

    def write(self, name: str, text: str) -> Path:
        """Write a file whole or not at all."""
        target = self.path / name
        temporary = target.with_name(target.name + ".tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._disk_error(error, target) from error
        return target

    def _disk_error(self, error: OSError, target: Path) -> UserError:
        """Where a run has begun, the next step is to go on with it."""
        found = disk_error(error, target)
        if not (self.path / REQUEST).is_file():
            return found
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return UserError(
            found.message, f"{'free disk space there' if full else 'make it writable'}, then: align resume {self.path}"
        )

    def withdraw(self, log: Path, keep: Path) -> Path | None:
        """Take back everything that the run wrote, so that the same command finds the directory as it was, unlocked.

        Args:
            log: a file in the directory that people may still want; it need not exist.
            keep: directory that the log is moved to; made if need be.

        Returns:
            where the log is now; ``None`` if there is none.

        Raises:
            OSError: the log cannot be moved, and everything is as it was; or something cannot be removed.
        """
        kept = None
        if log.exists():
            keep.mkdir(parents=True, exist_ok=True)
            stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
            # The process id tells apart what two commands keep within one second.
            kept = keep / f"{stamp}-{self.path.name}-{os.getpid()}-{log.name}"
            shutil.move(log, kept)
        for entry in self.path.iterdir():
            _remove(entry)
        if self._made:
            self.path.rmdir()
        self.close()
        return kept

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _occupied(path: Path) -> str:
    """What to do about a directory that holds something."""
    if (path / REQUEST).is_file():
        return f"go on with the run that it holds: align resume {path}; or choose another --out"
    return "choose another --out, or remove it: results of two runs are never mixed"


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; ``None`` where the file system has no locks.

    Raises:
        UserError: another process holds it.
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # perhaps is_locked, which has it for a moment
            time.sleep(_MOMENT)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        holder = _holder(os.fstat(descriptor))
        os.close(descriptor)
        who = "another command" if holder is None else f"process {holder}"
        raise UserError(
            f"{path} is in use by {who}", "wait until it has ended" + ("" if holder is None else f", or: kill {holder}")
        ) from None
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise


def is_locked(path: Path) -> bool:
    """Whether a command is using a directory; also false where that cannot be told."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once, see _locked
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _holder(status: os.stat_result) -> int | None:
    """The process that the kernel names as the holder of a lock on a file, if it does."""
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5] == place and int(fields[4]) > 0:
                return int(fields[4])
    return None
