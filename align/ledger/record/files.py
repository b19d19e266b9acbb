"""The files of the records: what workers append step by step, and what is read back.

::

    rank0.jsonl    a line per forward: what the record says in words and numbers, and where its tensors are
    rank0.bin      those tensors, one safetensors image after the other
    run1.json      the token ids of that run's requests, prompt and answer, once it is over; those of further
                   data-parallel groups are in run1-dp1.json, …

A line follows its tensors, so what a line names is whole; a last line that was cut does not count. A line leaves out
what the line before it says as well: most of a record is that of the step before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch

from align.ledger.record.types import IndexRecord
from align.trace.encode import encode

#: The directory of these files, in that of the probe and in a trace.
FOLDER = "ledger"
SCHEMA = 1


class LedgerWriter:
    """Appends the records of one rank.

    Args:
        directory: made if need be; an earlier launch's records of this rank are replaced.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = (directory / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self._data = (directory / f"rank{rank}.bin").open("wb")
        self._at = 0
        self._before: dict[str, Any] = {}

    def write(self, record: IndexRecord) -> int:
        """Append a record; returns the bytes that it takes."""
        plain, tensors = record.split()
        image = b"".join(encode(tensors, {"schema": str(SCHEMA)}))
        self._data.write(image)
        self._data.flush()
        new = {key: value for key, value in plain.items() if key not in self._before or self._before[key] != value}
        line = json.dumps({**new, "at": self._at, "bytes": len(image)}, separators=(",", ":")) + "\n"
        self._before = plain
        self._at += len(image)
        self._lines.write(line)
        self._lines.flush()
        return len(image) + len(line)

    def close(self) -> None:
        self._lines.close()
        self._data.close()


def write_run(directory: Path, run: int, recording: str, tokens: Mapping[str, Sequence[int]], dp_rank: int = 0) -> None:
    """Leave what a run computed, once it is over.

    Args:
        run: its number within the launch, from 1.
        recording: name of the directory of the trace that it made; empty if it made none.
        tokens: request → ids of its prompt and of what it generated.
        dp_rank: the data-parallel group whose requests these are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    plain = {"schema": SCHEMA, "run": run, "recording": recording, "tokens": {k: list(v) for k, v in tokens.items()}}
    target = directory / (f"run{run}-dp{dp_rank}.json" if dp_rank else f"run{run}.json")
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(plain), encoding="utf-8")
    os.replace(temporary, target)


@dataclass(frozen=True)
class Run:
    """One run of a launch; see :func:`write_run`."""

    number: int
    recording: str
    tokens: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Records:
    """What the workers of one side recorded.

    Attributes:
        records: rank after rank, each in the order in which it computed.
        runs: those that ended, in order.
        bytes: of the files.
    """

    records: tuple[IndexRecord, ...] = ()
    runs: tuple[Run, ...] = ()
    bytes: int = 0
    ranks: tuple[int, ...] = field(default=())


def read_records(directory: Path) -> Records | None:
    """The records in a directory; ``None`` if there are none.

    Raises:
        ValueError: a file is damaged; names it.
    """
    paths = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not paths:
        return None
    records: list[IndexRecord] = []
    size = 0
    for path in paths:
        records += _read_rank(path)
        size += path.stat().st_size + path.with_suffix(".bin").stat().st_size
    runs = sorted((_read_run(path) for path in directory.glob("run*.json")), key=lambda run: run.number)
    ranks = tuple(int(path.stem.removeprefix("rank")) for path in paths)
    return Records(tuple(records), tuple(runs), size, ranks)


def _read_rank(path: Path) -> list[IndexRecord]:
    found: list[IndexRecord] = []
    plain: dict[str, Any] = {}
    try:
        data = path.with_suffix(".bin").read_bytes()
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # the worker was killed while it wrote
                plain = {**plain, **json.loads(line)}
                image = data[plain["at"] : plain["at"] + plain["bytes"]]
                found.append(IndexRecord.join(plain, safetensors.torch.load(image)))
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return found


def _read_run(path: Path) -> Run:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        tokens = {str(name): tuple(map(int, ids)) for name, ids in plain["tokens"].items()}
        return Run(int(plain["run"]), str(plain["recording"]), tokens)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
