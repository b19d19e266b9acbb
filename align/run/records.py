"""Files that workers append to while a side runs, kept beside a trace: indices into the cache, and collectives."""

from __future__ import annotations

import shutil
from pathlib import Path

from align.run.directory import disk_error

_KEPT = (".jsonl", ".json", ".bin")


def copy_records(source: Path, target: Path) -> None:
    """Copy the records of a folder; an earlier copy is replaced, and a folder that is not there leaves none.

    The workers may go on meanwhile: lines are copied before the tensors that they name.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        shutil.rmtree(target, ignore_errors=True)
        if not source.is_dir():
            return
        target.mkdir()
        files = [path for path in source.iterdir() if path.suffix in _KEPT]
        for path in sorted(files, key=lambda path: (path.suffix == ".bin", path.name)):
            shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise disk_error(error, target) from error
