"""Every fault at every stage: how the command ends, what it leaves, and whether one can go on. Fills the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integration import cells
from tests.integration.cells import CELLS, Cell, Row
from tests.integration.havoc import NotPermittedError
from tests.integration.scene import Scene
from tests.integration.support import run_align

_COMMITTED = Path(__file__).parent
#: Names the directory whose table is written anew.
_VARIABLE = "ALIGN_ROBUSTNESS_TABLE"


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], None]:
    """Puts a row into this session's table at once, and into the one that is to be made anew."""
    mine = tmp_path_factory.getbasetemp()
    target = os.environ.get(_VARIABLE)

    def put(row: Row) -> None:
        cells.write_rows(mine, cells.merged(cells.read_rows(mine / cells.TSV), [row]))
        if target:
            folder = Path(target)
            cells.write_rows(folder, cells.merged(cells.read_rows(folder / cells.TSV), [cells.rounded(row)]))

    return put


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A run that ended; made when it is first asked for."""

    @cache
    def made() -> Path:
        run = tmp_path_factory.mktemp("recording") / "run"
        done = run_align("run", "--model", "qwen3", "--out", str(run), RAY_worker_niceness="0")
        assert done.returncode == 0, done.stdout + done.stderr
        return run

    return made


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.id, marks=[pytest.mark.extended] if cell.extended else []) for cell in CELLS],
)
def test_a_fault_ends_clearly_and_one_can_go_on(
    cell: Cell, keep: Callable[[Row], None], recording: Callable[[], Path], tmp_path: Path
) -> None:
    try:
        with Scene(cell, tmp_path, recording) as scene:
            row, ended = scene.measure()
            left = scene.temporary_files()
    except NotPermittedError as reason:
        keep(cells.not_tried(cell, str(reason)))
        pytest.skip(str(reason))
    keep(row)
    everything = f"{row}\n{ended.out}{ended.err}"
    assert row.judged == (str(cell.exit), "0", "0", "yes"), everything
    assert "Traceback" not in ended.out + ended.err, everything
    assert "(raylet)" not in ended.out + ended.err, everything
    if cell.exit in (2, 130, 143):
        assert ended.message(), everything
        assert "next: " in ended.message() or "→ " in ended.message(), everything
    assert left == [], everything
    if _VARIABLE not in os.environ:
        committed = {row.key: row for row in cells.read_rows(_COMMITTED / cells.TSV)}
        assert committed[cell.key].judged == row.judged, f"make the table anew: {_VARIABLE}=tests/integration"
