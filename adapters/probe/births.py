"""Which processes the workers of a side are, and what went wrong in one of them.

Some engines wait for ever for a worker that died before it was ready, or that failed in a step. So a worker says who it
is as soon as it knows its rank, and leaves its own traceback if it cannot go on; the driver looks at both while it
waits.

* ``worker-rank{r}.json``: the process.
* ``failed-rank{r}.json``: why it cannot go on.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.probe.launch import probe_dir

#: What a rank says of a collective whose other ranks have gone, in the words of gloo and of sockets.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Fall:
    """The end of a worker: ``error`` in one line, ``traceback`` as it would be printed.

    ``during``: ``build``, until it can take inputs, or ``step``.
    """

    rank: int
    during: str
    error: str
    traceback: str


def _write(name: str, plain: dict[str, Any]) -> None:
    target = probe_dir() / name
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(plain), encoding="utf-8")
    os.replace(temporary, target)


def _read(directory: Path, kind: str) -> dict[int, dict[str, Any]]:
    found = {}
    for path in directory.glob(f"{kind}-rank*.json"):
        rank = path.stem.removeprefix(f"{kind}-rank")
        if rank.isdigit():
            found[int(rank)] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def announce(rank: int) -> None:
    """This process is the worker of a global rank."""
    _write(f"worker-rank{rank}.json", {"pid": os.getpid()})


def announced(directory: Path) -> dict[int, int]:
    """Process by rank, of the workers that said who they are."""
    return {rank: int(plain["pid"]) for rank, plain in _read(directory, "worker").items()}


@contextmanager
def told(rank: int, during: str = "build") -> Iterator[None]:
    """Around a part of a worker's work: what raises is left for the driver, and goes on."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        about = {"during": during, "error": text, "traceback": traceback.format_exc()}
        _write(f"failed-rank{rank}.json", about)
        raise


def read_falls(directory: Path) -> tuple[Fall, ...]:
    """Of the workers that could not go on, by rank; those behind, which only lost another one."""
    found = [
        Fall(rank, one["during"], one["error"], one["traceback"]) for rank, one in _read(directory, "failed").items()
    ]
    return tuple(sorted(found, key=lambda one: any(text in one.error for text in _LOST)))
