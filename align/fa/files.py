"""The files in which workers leave the calls of attention and cache operators, and what is read back.

::

    rank0.jsonl    lines of one rank, in the order in which they happened
                   {"call": 3, "record": …, "layer": 0, "at": […], "run": 1, "step": 0, "phase": …, "rows": …}
                        a call that was not seen before, written before the operator runs
                   {"seen": {"3": [0, 1, 2]}, "run": 1, "step": 0, "phase": …, "rows": …}
                        the end of a step: which calls it made, and in which layers
                   {"failure": operator, "why": …}    a call that could not be described

The record is :func:`align.fa.call_record`'s without a context: the step says the phase and the lengths, and the model's
configuration the rest. A last line that was cut does not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.fa.call import Call, call_record, read_call

#: The directory of these files, in that of the probe and in a trace.
FOLDER = "fa"
SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """Tokens of one request in a step: ``count`` from position ``start`` on."""

    request: str
    start: int
    count: int


@dataclass(frozen=True)
class Step:
    """A forward of one rank: its run within the launch, its number in the run, and its rows in batch order."""

    rank: int
    run: int
    step: int
    phase: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Seen:
    """One call in one step: equal in all ``layers``, and made first ``at`` (``file:line function``, innermost first).

    ``call`` is an index into :attr:`Records.calls`.
    """

    step: Step
    call: int
    layers: tuple[int, ...]
    at: tuple[str, ...] = ()


@dataclass(frozen=True)
class Records:
    """What the workers of one side recorded.

    Attributes:
        calls: without contexts, equal ones once.
        seen: rank after rank, in the order in which they happened.
        failures: operator → why a call of it was not described.
        bytes: of the files.
    """

    calls: tuple[Call, ...] = ()
    seen: tuple[Seen, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    bytes: int = 0


class CallWriter:
    """Appends the calls of one rank.

    Args:
        directory: made if need be; an earlier launch's records of this rank are replaced.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self._write({"schema": SCHEMA, "rank": rank})

    def call(self, number: int, call: Call, layer: int, at: Sequence[str], step: Step) -> None:
        """A call that was not seen before is about to be made."""
        record = call_record(call)
        record.pop("context")
        self._write({"call": number, "record": record, "layer": layer, "at": list(at), **_of(step)})

    def seen(self, layers: Mapping[int, Sequence[int]], step: Step) -> None:
        """A step is over: number of a call → layers that made it."""
        self._write({"seen": {str(number): list(found) for number, found in layers.items()}, **_of(step)})

    def failure(self, operator: str, why: str) -> None:
        self._write({"failure": operator, "why": why})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


def _of(step: Step) -> dict[str, Any]:
    rows = [[row.request, row.start, row.count] for row in step.rows]
    return {"run": step.run, "step": step.step, "phase": step.phase, "rows": rows}


def read_records(directory: Path) -> Records | None:
    """The records in a directory; ``None`` if there are none.

    Raises:
        ValueError: a file is damaged; names it.
    """
    paths = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not paths:
        return None
    calls: dict[Any, int] = {}
    kept: list[Call] = []
    seen: list[Seen] = []
    failures: dict[str, str] = {}
    for path in paths:
        try:
            _read_rank(path, calls, kept, seen, failures)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    ranks = tuple(int(path.stem.removeprefix("rank")) for path in paths)
    return Records(tuple(kept), tuple(seen), failures, ranks, sum(path.stat().st_size for path in paths))


def _read_rank(path: Path, calls: dict[Any, int], kept: list[Call], seen: list[Seen], failures: dict[str, str]) -> None:
    rank = int(path.stem.removeprefix("rank"))
    numbers: dict[int, int] = {}
    places: dict[int, tuple[str, ...]] = {}
    #: Of a step that has not ended: what it made first.
    open_: dict[Step, dict[int, list[int]]] = {}
    for line in _lines(path):
        if "failure" in line:
            failures.setdefault(str(line["failure"]), str(line["why"]))
        if "run" not in line:
            continue
        rows = tuple(Row(str(name), int(start), int(count)) for name, start, count in line["rows"])
        step = Step(rank, int(line["run"]), int(line["step"]), str(line["phase"]), rows)
        if "call" in line:
            call = read_call(line["record"])
            number = calls.setdefault(call.key(), len(kept))
            if number == len(kept):
                kept.append(call)
            numbers[int(line["call"])] = number
            places[int(line["call"])] = tuple(map(str, line["at"]))
            open_.setdefault(step, {}).setdefault(int(line["call"]), []).append(int(line["layer"]))
        else:
            open_.pop(step, None)
            made = {int(number): layers for number, layers in line["seen"].items()}
            seen += [Seen(step, numbers[one], tuple(layers), places[one]) for one, layers in made.items()]
    for step, made in open_.items():  # it raised
        seen += [Seen(step, numbers[one], tuple(layers), places[one]) for one, layers in made.items()]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # the worker was killed while it wrote
            yield json.loads(line)
