"""The matrix of faults and stages, and the table of what was measured: ``robustness.tsv`` and ``robustness.md``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

STAGES = ("environment", "model", "launch", "capture", "compare", "report")
KILL, INTERRUPT, TERMINATE = "kill -9 driver", "Ctrl-C", "SIGTERM"
FULL, READ_ONLY = "disk full", "read-only directory"
SAME_OUT, TWO_RESUMES, SAME_HOME = "second run, same --out", "second align resume", "second build, same ALIGN_HOME"
#: Processes that are killed while the driver lives.
HOST, OTHER_HOST, GUARDIAN = "kill -9 candidate's engine", "kill -9 reference's engine", "kill -9 guardian"
RAYLET, GCS = "kill -9 Ray's raylet", "kill -9 Ray's gcs_server"
PIP = "kill -9 pip"
VICTIMS = (HOST, OTHER_HOST, GUARDIAN, RAYLET, GCS, PIP)

BOOTSTRAP, RUN, RESUME = "make env", "align run", "align resume"
NOT_TRIED = "not tried"
TSV, MARKDOWN = "robustness.tsv", "robustness.md"

_COMMON = (KILL, INTERRUPT, TERMINATE, FULL, READ_ONLY)
#: As a shell sees them: 128 + the number of the signal that ended a process.
_CODES = {KILL: 137, INTERRUPT: 130, TERMINATE: 143, GUARDIAN: 0}


@dataclass(frozen=True)
class Cell:
    """One fault at one stage.

    Attributes:
        command: that was disturbed: ``make env`` (its ``python -m envs.bootstrap``), ``align run``, ``align resume``.
        exit: its exit code as a shell sees it; of two commands at once, that of the second.
        extended: takes a run of the engines, so ``make integration`` leaves it out.
    """

    stage: str
    command: str
    fault: str
    exit: int
    extended: bool = True

    @property
    def key(self) -> tuple[str, str, str]:
        return self.stage, self.command, self.fault

    @property
    def id(self) -> str:
        return f"{self.stage}-{self.command}-{self.fault}".replace(" ", "_")


def _cells() -> tuple[Cell, ...]:
    def cell(stage: str, command: str, fault: str, exit_code: int | None = None, extended: bool = True) -> Cell:
        return Cell(stage, command, fault, _CODES.get(fault, 2) if exit_code is None else exit_code, extended)

    found = [cell("environment", BOOTSTRAP, fault, extended=fault not in (KILL, INTERRUPT)) for fault in _COMMON]
    found += [cell("environment", BOOTSTRAP, PIP), cell("environment", BOOTSTRAP, SAME_HOME, 0)]
    found += [cell("model", RUN, fault) for fault in (*_COMMON, SAME_OUT)]
    found += [cell("launch", RUN, fault) for fault in (*_COMMON, HOST, GUARDIAN, RAYLET, SAME_OUT)]
    found += [cell("capture", RUN, fault) for fault in (*_COMMON, HOST, OTHER_HOST, GUARDIAN, GCS, TWO_RESUMES)]
    found += [cell("compare", RUN, KILL), cell("compare", RUN, INTERRUPT)]
    found += [cell("compare", RUN, HOST, 0)]  # both recordings are whole: nobody needs the engine any more
    for stage, quick in (("compare", (KILL, TWO_RESUMES)), ("report", (TERMINATE, FULL))):
        found += [cell(stage, RESUME, fault, extended=fault not in quick) for fault in (*_COMMON, TWO_RESUMES)]
    return tuple(found)


CELLS = _cells()


@dataclass(frozen=True)
class Row:
    """What was measured of one cell; text, as it stands in the table.

    Attributes:
        seconds: from the fault to the end of the command; of two at once, from the second's start to its end.
        gone: seconds from there to the end of the last process of the run.
        orphans: processes of the run that are left when they have to be gone.
        halves: half files that were, or would be, taken for whole ones.
        resumable: whether going on ended well.
        by: the command that went on, and the seconds it took.
        message: first line that the command said about the fault, and what it says to do next.
    """

    stage: str
    command: str
    fault: str
    exit: str = NOT_TRIED
    seconds: str = ""
    gone: str = ""
    orphans: str = ""
    halves: str = ""
    resumable: str = ""
    by: str = ""
    message: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.stage, self.command, self.fault

    @property
    def judged(self) -> tuple[str, ...]:
        """What must be the same on every machine."""
        return self.exit, self.orphans, self.halves, self.resumable


def not_tried(cell: Cell, reason: str) -> Row:
    """The row of a cell that could not be measured here."""
    return Row(*cell.key, message=reason)


def merged(old: Sequence[Row], new: Iterable[Row]) -> list[Row]:
    """One row for each cell, in the matrix's order: the new one, or the old one, or none was ever measured."""
    rows = {row.key: row for row in old}
    for row in new:
        if row.exit != NOT_TRIED or rows.get(row.key, row).exit == NOT_TRIED:
            rows[row.key] = row
    return [rows.get(cell.key, not_tried(cell, "not run yet")) for cell in CELLS]


def read_rows(file: Path) -> list[Row]:
    """The rows of a table; none if there is no file."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as text:
        return [Row(**row) for row in csv.DictReader(text, delimiter="\t")]


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write both forms of the table."""
    with (folder / TSV).open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, [field.name for field in fields(Row)], delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    (folder / MARKDOWN).write_text(markdown(rows), encoding="utf-8")


_INTRODUCTION = """\
# What a run survives

Measured by `tests/integration/test_robustness.py`, tokens and tensors, model `qwen3`. At each stage the command was
held and a fault injected; afterwards it was really gone on with: by `align resume`, or by the same command where there
was no run yet. *Seconds* is the time from the fault to the end of the command (of two commands at once: of the second),
*gone* the time from there to the end of its last process; *orphans* are processes of the run that are left 10 seconds
later, *half files* those that were, or would be, taken for whole ones. `not tried` is no pass.

`ALIGN_ROBUSTNESS_TABLE=tests/integration make extended ARGS='-k robustness'` measures the table anew.

"""


def markdown(rows: Sequence[Row]) -> str:
    """The table for people."""
    head = [
        "stage", "command", "fault", "exit code", "seconds", "gone", "orphans", "half files", "resumable", "by",
        "message",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    lines += [[value.replace("|", "\\|") for value in asdict(row).values()] for row in rows]
    return _INTRODUCTION + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rounded(row: Row) -> Row:
    """With seconds that the next measurement is likely to repeat."""
    return replace(row, seconds=_whole(row.seconds), gone=_whole(row.gone))


def _whole(seconds: str) -> str:
    return str(round(float(seconds))) if seconds else ""
