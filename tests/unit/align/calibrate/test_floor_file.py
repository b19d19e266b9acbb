"""The file: what is written reads back equal, and its thresholds are largest times margin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.calibrate.distribution import LEAST_MARGIN
from align.calibrate.floor import load_floor
from align.errors import UserError
from tests.unit.align.calibrate import floors


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    made = floors.floor(golden=1.2)
    file = tmp_path / "new" / "tiny.json"
    made.save(file)
    assert load_floor(file) == made
    plain = json.loads(file.read_text())
    assert plain["provenance"]["simulated"] is True
    assert plain["kinds"]["attn.q"]["carried"]["token"]["largest"] == 2.0
    assert list(plain["kinds"]) == ["embed", "attn.q", "mlp.up"], "in the table's order"
    assert [path.name for path in file.parent.iterdir()] == ["tiny.json"]


def test_thresholds(tmp_path: Path) -> None:
    kinds = floors.floor().kinds
    assert kinds["attn.q"].limit("whole") == pytest.approx(LEAST_MARGIN)
    assert kinds["attn.q"].limit("channel") == pytest.approx(3 * LEAST_MARGIN)
    assert kinds["embed"].limit("whole") == 0.0
    assert kinds["embed"].limit("token") is None


def test_golden_lifts_a_threshold_and_has_no_margin_of_its_own() -> None:
    assert floors.floor(golden=1.4).kinds["attn.q"].limit("whole") == pytest.approx(LEAST_MARGIN)
    assert floors.floor(golden=2.5).kinds["attn.q"].limit("whole") == 2.5


def test_operators_are_kept_and_judge_nothing() -> None:
    made = floors.floor()
    assert made.kinds["attn.q"].operator["element"].largest == 0.9
    assert set(made.rule().limits["attn.q"]) == {"whole", "token", "channel", "head"}


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 2}', '{"name": "x"}', "\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        load_floor(file)
    assert str(file) in caught.value.message


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        floors.floor().save(tmp_path / "file" / "tiny.json")
