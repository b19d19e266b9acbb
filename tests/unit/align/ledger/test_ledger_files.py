"""The files of the records: what was appended is read back, and a killed worker costs the last line at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.ledger.ledger import audit
from align.ledger.record.files import LedgerWriter, read_records, write_run
from tests.unit.align.ledger.broken import CASES, asked, ran
from tests.unit.align.ledger.toy import Engine


def written(directory: Path, engine: Engine) -> None:
    writer = LedgerWriter(directory, 0)
    sizes = [writer.write(record) for record in engine.records]
    writer.close()
    assert sum(sizes) == sum(path.stat().st_size for path in directory.glob("rank0.*"))
    write_run(directory, 1, "trace", engine.tokens)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    engine = ran(CASES[0])
    written(tmp_path, engine)
    found = read_records(tmp_path)
    assert found is not None and found.ranks == (0,)
    assert found.runs[0].number == 1 and found.runs[0].recording == "trace"
    assert dict(found.runs[0].tokens) == {name: tuple(ids) for name, ids in engine.tokens.items()}
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.glob("rank0.*"))
    for mine, theirs in zip(engine.records, found.records, strict=True):
        assert mine.split()[0] == theirs.split()[0]
        assert all(torch.equal(value, theirs.split()[1][key]) for key, value in mine.split()[1].items())
    assert audit(found.records, found.runs[0].tokens) == audit(engine.records, engine.tokens)


def test_a_cut_line_does_not_count(tmp_path: Path) -> None:
    engine = Engine(asked()).run()
    written(tmp_path, engine)
    path = tmp_path / "rank0.jsonl"
    path.write_text(path.read_text()[:-5])
    found = read_records(tmp_path)
    assert found is not None and len(found.records) == len(engine.records) - 1


def test_damage_names_the_file(tmp_path: Path) -> None:
    written(tmp_path, Engine(asked()).run())
    data = tmp_path / "rank0.bin"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"rank0\.jsonl cannot be read"):
        read_records(tmp_path)
    (tmp_path / "run1.json").write_text("{}")
    written(tmp_path, Engine(asked()).run())
    (tmp_path / "run2.json").write_text('{"run": 2}')
    with pytest.raises(ValueError, match=r"run2\.json cannot be read"):
        read_records(tmp_path)


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert read_records(tmp_path) is None
    assert read_records(tmp_path / "absent") is None


def test_a_later_launch_replaces_what_an_earlier_one_left(tmp_path: Path) -> None:
    written(tmp_path, Engine(asked()).run())
    LedgerWriter(tmp_path, 0).close()
    found = read_records(tmp_path)
    assert found is not None and found.records == ()
