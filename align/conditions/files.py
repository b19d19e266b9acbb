"""SHA-256 of a checkpoint's files, remembered: hashing a large checkpoint takes minutes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from align.errors import UserError
from envs.errors import EnvError
from envs.home import align_home, make_directory, write_atomically

_CHUNK = 1 << 22
_CACHE = "file-hashes.json"
#: What decides a model besides its weights; absent ones are left out.
_SMALL = ("config.json", "generation_config.json", "model.safetensors.index.json")


def file_hashes(model: Path) -> dict[str, str]:
    """SHA-256 by file name of all ``*.safetensors`` and the configuration files of a checkpoint directory.

    A file is hashed again if its path, size, time of change (ns) or inode is another than when it was.

    Raises:
        UserError: a file cannot be read.
    """
    files = [*sorted(model.glob("*.safetensors")), *(model / name for name in _SMALL if (model / name).is_file())]
    known = _load()
    fresh: dict[str, str] = {}
    found: dict[str, str] = {}
    for file in files:
        try:
            key = _key(file)
            found[file.name] = known.get(key) or fresh.setdefault(key, sha256(file))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}", "check the file's permissions") from error
    if fresh:
        _store({**known, **fresh})
    return found


def sha256(file: Path) -> str:
    """Hexadecimal digest of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _key(file: Path) -> str:
    status = file.stat()
    return "\0".join([str(file.resolve()), str(status.st_size), str(status.st_mtime_ns), str(status.st_ino)])


def _load() -> dict[str, str]:
    try:
        read = json.loads((align_home() / _CACHE).read_text(encoding="utf-8"))
    except (OSError, ValueError, EnvError):
        return {}  # a cache only: what it does not say is computed
    return read if isinstance(read, dict) else {}


def _store(hashes: dict[str, str]) -> None:
    """Concurrent runs may lose each other's additions; they are then computed again."""
    present = {key: value for key, value in hashes.items() if Path(key.split("\0")[0]).exists()}
    try:
        write_atomically(make_directory(align_home()) / _CACHE, json.dumps(present))
    except (OSError, EnvError):
        return  # a home that cannot be written costs time, not the run
