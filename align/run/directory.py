"""The directory of one run: everything that is needed to understand and to repeat it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
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


class RunDirectory:
    """``case.json``, ``run.json``, ``tokens.json``, and one directory per side.

    Args:
        path: a directory that does not exist yet or is empty; ``None`` makes one below ``runs``.
        runs: where directories without a name of their own go.
        label: part of a made name, such as the model.

    Raises:
        UserError: the directory holds something already, or cannot be made.
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
                    raise UserError(
                        f"{self.path} is not an empty directory",
                        "choose another --out, or remove it: results of two runs are never mixed",
                    ) from None
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
            raise disk_error(error, target) from error
        return target

    def withdraw(self, log: Path, keep: Path) -> Path | None:
        """Take back everything that the run wrote, so that the same command finds the directory as it was.

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
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self._made:
            self.path.rmdir()
        return kept

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
