"""Where everything that is built lives: ``ALIGN_HOME``, outside of every checkout.

::

    ALIGN_HOME/envs/<name>-<key>/    a virtual environment, finished when it holds its marker file
    ALIGN_HOME/envs/<name>-<key>.lock  held (flock) while it is being built
    ALIGN_HOME/logs/                 complete pip output of every build
    ALIGN_HOME/bin/<checkout>/align  launcher of one checkout
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from envs.errors import EnvError

#: The checkout that this package belongs to: the entry that goes on an engine's path.
REPOSITORY = Path(__file__).resolve().parent.parent

WRITABLE_HINT = "name a writable directory with about 7 GB of space: ALIGN_HOME=/path make env"
SPACE_HINT = "free some space or use another disk: ALIGN_HOME=/path make env (`make clean-env` removes what is built)"


def align_home() -> Path:
    """Return the absolute cache directory: ``$ALIGN_HOME``, ``$XDG_CACHE_HOME/align`` or ``~/.cache/align``.

    Raises:
        EnvError: no home directory is known and neither variable is set.
    """
    if named := os.environ.get("ALIGN_HOME"):
        return Path(os.path.abspath(os.path.expanduser(named)))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative value must be ignored.
    if os.path.isabs(cache):
        return Path(cache, "align")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise EnvError("this user has no home directory to keep the environments in", WRITABLE_HINT)
    return Path(home, ".cache", "align")


def os_error(error: OSError, path: Path, doing: str) -> EnvError:
    """Turn a failed file operation on ``path`` into a message; ``doing`` completes "cannot ..."."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvError(f"cannot {doing}: the disk of {path} is full", SPACE_HINT)
    reason = error.strerror or str(error)
    return EnvError(f"cannot {doing}: {path}: {reason}", WRITABLE_HINT)


def make_directory(path: Path) -> Path:
    """Create ``path`` with its parents and return it.

    Raises:
        EnvError: it cannot be created or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, path, "create the directory for environments") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise EnvError(f"cannot write to {path}: permission denied", WRITABLE_HINT)
    return path


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` so that ``path`` is either absent (or as before) or complete, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
