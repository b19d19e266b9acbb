"""A run that is a part of something larger: a rung of a ladder, or a try of a reduction. Its caller tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from align.case.schema import Case
from align.cli.settings import RunSettings
from align.report.read import read_result
from align.result.schema import Result
from align.run.directory import CASE, RESULT, RunDirectory
from align.run.resume import verdict_on_disk

Execute = Callable[[RunSettings], int]


def start_part(settings: RunSettings, case: Case, place: Path, execute: Execute) -> None:
    """Run a case in a directory of its own, with the options of the whole.

    Args:
        place: may hold an earlier try of the same part, which is cleared.
        execute: makes a run.

    Raises:
        UserError, EnvError: it could not be compared.
    """
    reopened = RunDirectory.reopen(place) if place.is_dir() and any(place.iterdir()) else None
    execute(
        replace(
            settings,
            model=None, prompts=None, case_file=None, dtype=None, layout=(None, None, None), max_new_tokens=None,
            block_size=None, numerics=(), only=(), interactive=False, along=None, earlier="", accuse=(),
            ladder="never", layouts=(), min_tp=None, device_memory=None, against="",
            case=case,
            out=None if reopened else place,
            reopened=reopened,
            rung=True,
            json=False,
            named=(True, True),
            command=("align", "run", "--case", str(place / CASE)),
        )
    )  # fmt: skip


def ended_part(case: Case, place: Path) -> Result | None:
    """The result of a part that has ended already, of this very case."""
    try:
        same = (place / CASE).read_text(encoding="utf-8") == case.to_text()
    except OSError:
        return None
    return read_result(place / RESULT) if same and verdict_on_disk(place / RESULT) is not None else None
