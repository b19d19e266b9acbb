"""A launch made of toy runs: what a side's workers leave when engines run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from align.ledger.record.files import LedgerWriter, Records, Run, read_records, write_run
from align.ledger.record.types import IndexRecord
from tests.unit.align.ledger.toy import Engine

#: What the runs of a joint run record into: free, its repetition, the recorded replay.
JOINT = ("", "", "trace")


def in_run(engine: Engine, number: int) -> list[IndexRecord]:
    return [replace(record, run=number) for record in engine.records]


def launch(engines: Sequence[Engine], recordings: Sequence[str] = JOINT) -> Records:
    """The records of runs 1, 2, …, each by an engine of its own over the same blocks."""
    records = [record for number, engine in enumerate(engines, 1) for record in in_run(engine, number)]
    runs = [
        Run(number, recording, {name: tuple(ids) for name, ids in engine.tokens.items()})
        for number, (engine, recording) in enumerate(zip(engines, recordings, strict=True), 1)
    ]
    return Records(tuple(records), tuple(runs), 1000, (0,))


def leave(folder: Path, records: Records) -> Records:
    """Write them as workers do, and read them back."""
    writers = {rank: LedgerWriter(folder, rank) for rank in sorted({one.rank for one in records.records})}
    for record in records.records:
        writers[record.rank].write(record)
    for writer in writers.values():
        writer.close()
    for run in records.runs:
        write_run(folder, run.number, run.recording, run.tokens)
    found = read_records(folder)
    assert found is not None
    return found
