"""``align fa record``: what it writes is what ``align fa check`` takes, and errors say what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.attention.extract import Wanted
from align.cli import fa_check, fa_record
from align.errors import UserError
from tests.unit.adapters.probe.dense_engine import DenseEngine
from tests.unit.align.attention.recorded_calls import fused, left, paged, steps
from tests.unit.align.oracle.recorded_side import record


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    found = record(tmp_path / "trace", DenseEngine())
    left(
        found.directory / "fa",
        {
            steps("prefill"): [(fused(), (0, 1)), (fused(actual_seq_lengths=[3, 5]), (2,))],
            steps("decode", 1): [(paged(), (0, 1, 2))],
        },
    )
    return Path(found.directory)


def test_calls_are_written_and_checked_again(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "calls.json"
    assert fa_record.execute(trace, Wanted(), out, False) == 0
    said = capsys.readouterr().out
    assert "3 different calls, 6 in all" in said and f"next: align fa check {out}" in said
    assert [one["made"]["layers"] for one in json.loads(out.read_text())] == [[0, 1], [2], [0, 1, 2]]
    assert fa_check.execute([out], "en", True) == 1
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert ["fa.lengths.q-raw" in {one["rule"] for one in call["findings"]} for call in calls] == [False, True, False]


def test_a_part_of_them_by_any_spelling(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.json"
    wanted = Wanted(operator="torch_npu.npu_fused_infer_attention_score", phase="decode", layer=0)
    assert fa_record.execute(trace, wanted, out, True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["calls"], said["made"], said["out"]) == (1, 1, str(out))


def test_errors_say_what_there_is(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    with pytest.raises(UserError, match=r"no such call; there are: npu_fused_infer_attention_score in decode and pre"):
        fa_record.execute(trace, Wanted(layer=9), out, False)
    with pytest.raises(UserError, match="no phase 'prefil'"):
        fa_record.execute(trace, Wanted(phase="prefil"), out, False)
    with pytest.raises(UserError, match="no attention or cache operator 'softmax'"):
        fa_record.execute(trace, Wanted(operator="softmax"), out, False)
    with pytest.raises(UserError):
        fa_record.execute(trace, Wanted(), tmp_path / "nowhere" / "calls.json", False)
    (trace / "fa" / "rank0.jsonl").write_text('{"run": 0}\n')
    with pytest.raises(UserError, match="cannot be read") as caught:
        fa_record.execute(trace, Wanted(), out, False)
    assert "align capture" in caught.value.hint
    (trace / "fa" / "rank0.jsonl").unlink()
    with pytest.raises(UserError, match="no call was recorded"):
        fa_record.execute(trace, Wanted(), out, False)
    assert not out.exists()
