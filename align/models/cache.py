"""Where built models live, and how a directory is built so that a half-built one is never seen."""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from align.errors import UserError
from envs.home import align_home

#: Says what is going on during a build; called with one short line.
Say = Callable[[str], None]


def models_dir() -> Path:
    """Directory of the presets' checkpoints."""
    return align_home() / "models"


def storage_error(error: OSError, where: Path) -> UserError:
    """Turn a failed write below ``where`` into a message that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"no space left while writing {where}",
            f"free some space there (nothing half written was kept), or point ALIGN_HOME to a larger disk; "
            f"now it is {align_home()}",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = "the file system is read-only" if error.errno == errno.EROFS else "permission denied"
        return UserError(f"cannot write {where}: {reason}", "set ALIGN_HOME to a directory that you may write to")
    return UserError(
        f"cannot write {where}: {error.strerror or error}",
        f"check that {align_home()} is a directory on a working disk, or set ALIGN_HOME to another one",
    )


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``; the kernel releases it when the holder dies."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, built by ``build(temporary_dir)`` if it does not exist yet.

    The build happens in a temporary sibling that is renamed in one step, so ``target`` is whole whenever it
    exists. Builders of the same target queue on a lock; what a killed one left behind is removed by the next.

    Raises:
        UserError: the disk is full or the directory cannot be written.
    """
    if target.is_dir():
        return target
    prefix = f".{target.name}.building-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(stale)
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            try:
                build(temporary)
                temporary.chmod(0o755)
                temporary.replace(target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise storage_error(error, target) from error
    return target
