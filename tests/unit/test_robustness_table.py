"""The committed table of faults and stages holds every cell of the matrix, as the matrix expects it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from envs.home import REPOSITORY
from tests.integration import cells
from tests.integration.cells import CELLS, Cell, Row

FOLDER = REPOSITORY / "tests" / "integration"
#: Demanded of the table.
FEWEST = 25


def test_the_matrix_crosses_every_stage_with_every_fault() -> None:
    assert {cell.stage for cell in CELLS} == set(cells.STAGES)
    for stage in cells.STAGES:
        faults = {cell.fault for cell in CELLS if cell.stage == stage}
        assert {cells.KILL, cells.INTERRUPT, cells.TERMINATE, cells.FULL, cells.READ_ONLY} <= faults, stage
        assert faults & {cells.SAME_OUT, cells.TWO_RESUMES, cells.SAME_HOME}, stage
    assert all(count == 1 for count in Counter(cell.key for cell in CELLS).values())
    assert 4 <= sum(not cell.extended for cell in CELLS) <= 8, "make integration tries some, and not for long"
    assert 4 <= sum(not cell.extended for cell in CELLS) <= 8, "make integration tries some, and not for long"


def test_every_cell_was_measured() -> None:
    rows = cells.read_rows(FOLDER / cells.TSV)
    assert [row.key for row in rows] == [cell.key for cell in CELLS]
    assert len([row for row in rows if row.exit != cells.NOT_TRIED]) >= FEWEST
    for cell, row in zip(CELLS, rows, strict=True):
        if row.exit != cells.NOT_TRIED:
            assert row.judged == (str(cell.exit), "0", "0", "yes"), row
            assert float(row.seconds) >= 0
        else:
            assert row.message, "a cell that was not tried says why"
            assert row.judged == (cells.NOT_TRIED, "", "", ""), "what was not tried is no pass"


def test_both_forms_say_the_same() -> None:
    rows = cells.read_rows(FOLDER / cells.TSV)
    assert (FOLDER / cells.MARKDOWN).read_text(encoding="utf-8") == cells.markdown(rows)


def _row(cell: Cell, **more: str) -> Row:
    return Row(*cell.key, **{"exit": str(cell.exit), "orphans": "0", "halves": "0", "resumable": "yes", **more})


def test_a_new_measurement_replaces_its_row_and_keeps_the_others(tmp_path: Path) -> None:
    first, second, third = CELLS[:3]
    old = [_row(first, message="old"), _row(second, message="old")]
    new = [_row(second, message="new"), cells.not_tried(first, "mounting is not permitted here")]
    rows = cells.merged(old, new)
    assert [row.key for row in rows] == [cell.key for cell in CELLS]
    assert [row.message for row in rows[:3]] == ["old", "new", "not run yet"]
    refused = cells.not_tried(third, "mounting is not permitted here")
    assert cells.merged(rows, [refused])[2] == refused, "a reason replaces another"
    assert rows[2].exit == cells.NOT_TRIED and rows[2].key == third.key
    cells.write_rows(tmp_path, rows)
    assert cells.read_rows(tmp_path / cells.TSV) == rows


@pytest.mark.parametrize(("seconds", "whole"), [("0.4", "0"), ("9.6", "10"), ("", "")])
def test_seconds_are_rounded(seconds: str, whole: str) -> None:
    assert cells.rounded(_row(CELLS[0], seconds=seconds)).seconds == whole


def test_a_bar_does_not_break_the_table() -> None:
    (line,) = [line for line in cells.markdown([_row(CELLS[0], message="a | b")]).splitlines() if "a \\| b" in line]
    assert line.replace("\\|", "").count("|") == 12
