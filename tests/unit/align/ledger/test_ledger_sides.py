"""All runs of a launch in one audit: a fault is told by the recorded run if that shows it, and else by the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.ledger.record.files import Records, read_records, write_run
from align.ledger.record.types import Found, IndexRecord, Indices
from align.ledger.sides import NO_RECORDS, Audited, audit_folder, audit_side
from tests.unit.align.ledger import broken
from tests.unit.align.ledger.broken import CASES, asked, build, ran
from tests.unit.align.ledger.launch import JOINT, launch, leave
from tests.unit.align.ledger.toy import Batch, Engine


def clean() -> Engine:
    return Engine(asked()).run()


def faulty(name: str = "F01") -> Engine:
    return ran(next(case for case in CASES if case.name == name))


def with_record(records: Records, number: int, **changes: object) -> Records:
    changed = replace(records.records[number], **changes)  # type: ignore[arg-type]
    return replace(records, records=(*records.records[:number], changed, *records.records[number + 1 :]))


def test_right_runs_are_silent() -> None:
    found = audit_side(launch([clean(), clean(), clean()]), "trace")
    assert found.observable and found.wrongs == () and found.unseen == ()
    assert (found.recorded, found.runs, found.faults) == (3, (1, 2, 3), 0)
    assert found.records == 3 * len(clean().records)
    assert found.findings("candidate") == []


def test_the_recorded_run_is_accused_by_what_it_shows() -> None:
    """The same fault in all runs: names and step are those of the recorded one."""
    found = audit_side(launch([faulty(), faulty(), faulty()]), "trace")
    (finding,) = found.findings("candidate")
    assert finding.requests and not any("(run" in name for name in finding.requests)
    assert finding.evidence["writer"]["request"] == "r1" and finding.step == 1
    assert finding.evidence["run"] == finding.evidence["recorded_run"] == 3
    assert finding.evidence["other_runs"] == [1, 2] and finding.evidence["elsewhere"] is False
    assert found.faults == 3


def test_what_only_another_run_shows_says_so() -> None:
    found = audit_side(launch([clean(), faulty(), clean()]), "trace")
    (finding,) = found.findings("candidate")
    assert finding.evidence["elsewhere"] is True and finding.evidence["other_runs"] == [2]
    assert finding.evidence["writer"]["request"] == "r1 (run 2)" and finding.evidence["harmed"] == {}
    assert "seen in run 2 of this launch and not in run 3, which was recorded" in finding.summary
    assert found.findings("candidate", everywhere=False) == []


def test_kinds_of_the_recorded_run_come_first_in_time() -> None:
    both = build(next(case for case in CASES if case.name == "A-37"))  # index_dtype from step 0 on

    def fault(engine: Engine, batch: Batch) -> None:
        broken.wide(engine, batch)
        broken.shifted(engine, batch)

    both.fault = fault
    found = audit_side(launch([faulty("frozen"), clean(), both.run()]), "trace")
    kinds = [(one.evidence["fault"], one.evidence["elsewhere"]) for one in found.findings("reference")]
    assert kinds == [("index_dtype", False), ("wrong_slot", False), ("frozen_length", True)]


@pytest.mark.parametrize(
    ("recordings", "recording", "recorded"),
    [
        (JOINT, "trace", 3),
        (("", "trace", "trace"), "trace", 3),
        (("", "trace", "closer"), "trace", 2),
        (("", "trace", "closer"), "closer", 3),
        (("", "", ""), "", 3),
    ],
)
def test_the_recorded_run_is_the_last_that_says_so(recordings: tuple[str, ...], recording: str, recorded: int) -> None:
    found = audit_side(launch([clean(), clean(), clean()], recordings), recording)
    assert (found.recorded, found.unseen) == (recorded, ())


def test_an_unknown_recording_is_told() -> None:
    found = audit_side(launch([clean(), clean()], ("", "")), "trace")
    assert found.recorded == 2 and "which run was recorded" in found.unseen[0]


def test_without_the_first_run_a_prefix_may_be_older() -> None:
    requests = asked(prefix=True)
    requests[2].arrives = 2
    engine = Engine(requests, caching=True).run()
    records = launch([engine], ("trace",))
    only = [replace(one, spans=one.spans[-1:]) for one in records.records if one.step == 2]  # r2 alone, after its hit
    (one,) = only
    first = sum(span.count for span in records.records[2].spans[:-1])
    assert one.spans[0].request == "r2" and one.spans[0].start == 12
    base = replace(one.base, slots=one.base.slots[first:], tables=one.base.tables[-1:], kv_lens=one.base.kv_lens[-1:])
    base = replace(base, q_lens=base.q_lens[-1:], q_starts=None)
    one = replace(one, base=base, written=None, key_rows=None, found=Found())
    for run, older in ((1, False), (2, True)):
        part = Records((replace(one, run=run),), (replace(records.runs[0], number=run),))
        found = audit_side(part, "trace")
        assert any("before the recording began" in why for why in found.unseen) is older
        assert [wrong.kind for wrong in found.wrongs] == ([] if older else ["prefix_missing"])


def test_what_could_not_be_recorded_is_not_observable() -> None:
    records = launch([clean()], ("trace",))
    records = with_record(records, 0, failures={"tables": "AttributeError: block_offsets"})
    found = audit_side(records, "trace")
    total = len(records.records)
    assert f"tables: AttributeError: block_offsets (in 1 of {total} records)" in found.unseen
    assert not found.observable and not found.wrongs


def test_no_record_of_the_recorded_run_is_no_pass() -> None:
    records = launch([clean(), clean()], ("", "trace"))
    records = replace(records, records=tuple(one for one in records.records if one.run == 1))
    found = audit_side(records, "trace")
    assert not found.observable and "run 2: no index was recorded of it" in found.unseen


# ---------------------------------------------------------------------------------------------------- bad records


def indices(record: IndexRecord, **changes: torch.Tensor) -> Indices:
    return replace(record.base, **changes)


def test_a_malformed_record_ends_its_run_and_no_other() -> None:
    records = launch([clean(), clean(), faulty()])
    assert records.records[2].written is not None
    records = with_record(records, 2, written=records.records[2].written[:, :1])
    found = audit_side(records, "trace")
    (why,) = (one for one in found.unseen if "malformed" in one)
    assert why.startswith("run 1 of rank 0 from its step 2 on") and "ValueError" in why
    (finding,) = found.findings("candidate")
    assert finding.evidence["fault"] == "wrong_slot" and finding.evidence["run"] == 3


def test_faults_before_a_malformed_record_stay() -> None:
    records = launch([faulty()], ("trace",))
    assert records.records[4].written is not None
    records = with_record(records, 4, written=records.records[4].written[:, :1])
    found = audit_side(records, "trace")
    assert [one.kind for one in found.wrongs] == ["wrong_slot"] and any("malformed" in one for one in found.unseen)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("shape", ["flat", "short", "none"])
def test_tables_without_a_row_for_each_request(number: int, shape: str) -> None:
    records = launch([faulty(), clean()], ("", "trace"))
    base = records.records[number].base
    tables = {"flat": base.tables.reshape(-1), "short": base.tables[:1], "none": base.tables[:0]}[shape]
    found = audit_side(with_record(records, number, base=indices(records.records[number], tables=tables)), "trace")
    assert not any("malformed" in why or "cannot be replayed" in why for why in found.unseen), found.unseen
    assert "table_shape" in [one.kind for one in found.wrongs]


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("left", [0, 1])
def test_lengths_that_are_missing_are_no_pass(number: int, left: int) -> None:
    records = launch([clean()], ("trace",))
    base = indices(records.records[number], kv_lens=records.records[number].base.kv_lens[:left])
    found = audit_side(with_record(records, number, base=base), "trace")
    assert found.wrongs == () and any("lengths" in why for why in found.unseen)
    assert not any("malformed" in why for why in found.unseen)


def test_missing_lengths_do_not_hide_a_fault() -> None:
    records = launch([faulty("frozen")], ("trace",))
    base = indices(records.records[1], kv_lens=records.records[1].base.kv_lens[:0])
    found = audit_side(with_record(records, 1, base=base), "trace")
    assert {one.kind for one in found.wrongs} & {"frozen_length", "wrong_length"}


# ---------------------------------------------------------------------------------------------------------- files


def test_the_same_from_files(tmp_path: Path) -> None:
    records = launch([clean(), clean(), faulty()])
    written = leave(tmp_path, records)
    assert audit_folder(tmp_path, "trace") == replace(audit_side(records, "trace"), bytes=written.bytes)


def test_no_folder_and_a_damaged_one_are_not_observable(tmp_path: Path) -> None:
    assert audit_folder(tmp_path, "trace") == Audited(False, unseen=(NO_RECORDS,))
    leave(tmp_path, launch([clean()], ("trace",)))
    (tmp_path / "rank0.bin").write_bytes(b"")
    found = audit_folder(tmp_path, "trace")
    assert not found.observable and "rank0.jsonl cannot be read" in found.unseen[0]


# ---------------------------------------------------------------------------------------------------------- reach


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whose_attention_is_wrong_and_since_when(case: broken.Case) -> None:
    engine = ran(case)
    (finding, *_) = audit_side(launch([engine], ("trace",)), "trace").findings("candidate")
    harmed = finding.evidence["harmed"]
    harmless = case.kind in ("index_dtype",)
    assert bool(harmed) is not harmless
    first = finding.evidence["first_read"]
    if first is not None:
        assert first["request"] in harmed
        spans = [span for one in engine.records if one.step == first["step"] for span in one.spans]
        (start,) = (span.start for span in spans if span.request == first["request"])
        assert harmed[first["request"]]["position"] <= start


def test_a_request_that_nobody_harmed_is_not_in_reach() -> None:
    """r2's prompt was overwritten by r1's shifted slot, and r1 lost what it wrote; nobody touched r0."""
    (finding,) = audit_side(launch([faulty()], ("trace",)), "trace").findings("candidate")
    assert set(finding.evidence["harmed"]) == {"r1", "r2"}
    assert finding.evidence["harmed"]["r1"] == {"layer": 0, "position": 7}


def test_a_length_that_is_too_short_misleads_attention_although_every_row_is_right() -> None:
    def fault(engine: Engine, batch: Batch) -> None:
        row = batch.row("r1")
        if row >= 0 and broken.decode(batch):
            batch.kv_lens[row] -= 1  # and the slots stay right

    (finding,) = audit_side(launch([Engine(asked(), fault=fault).run()], ("trace",)), "trace").findings("candidate")
    assert finding.evidence["fault"] == "wrong_length"
    assert finding.evidence["harmed"] == {"r1": {"layer": 0, "position": 7}}
    assert finding.evidence["first_read"]["position"] == 7 and finding.evidence["first_read"]["step"] == 1


def test_an_idle_forward_that_writes_a_live_slot_is_told_with_its_data_parallel_rank(tmp_path: Path) -> None:
    """F04 on group 1; group 0, with requests of its own, is clean."""
    one = launch([clean(), clean(), clean()])
    other = launch([faulty("F04"), faulty("F04"), faulty("F04")])
    idle = [
        replace(
            record, rank=1, dp_rank=1, spans=tuple(replace(span, kind="idle") if span.kind == "dummy" else span
                                                   for span in record.spans)
        )
        for record in other.records
    ]  # fmt: skip
    found = audit_folder(leave_all(tmp_path, replace(one, records=(*one.records, *idle), ranks=(0, 1))), "trace")
    assert found.groups == {0: 0, 1: 1}
    (finding,) = found.findings("candidate")
    assert (finding.path, finding.ranks, finding.evidence["fault"]) == ("A", (1,), "dummy_write")
    assert finding.evidence["scope"]["dp_ranks"] == [1]
    assert finding.evidence["what"].startswith("on data-parallel rank 1: the idle forward after step")
    assert finding.evidence["victim"]["request"] == "r0"


def test_one_group_is_not_named() -> None:
    found = audit_side(launch([faulty("F04"), faulty("F04"), faulty("F04")]), "trace")
    (finding,) = found.findings("candidate")
    assert found.groups == {} and "dp_ranks" not in finding.evidence["scope"]
    assert "data-parallel" not in finding.evidence["what"]


def leave_all(folder: Path, records: Records) -> Path:
    leave(folder, records)
    return folder


def test_tokens_of_groups_lie_beside_each_other(tmp_path: Path) -> None:
    write_run(tmp_path, 1, "trace", {"a": [1, 2]})
    write_run(tmp_path, 1, "trace", {"b": [3]}, dp_rank=1)
    leave(tmp_path, replace(launch([clean()], ("",)), runs=()))
    found = read_records(tmp_path)
    assert found is not None
    assert sorted((run.number, run.recording, dict(run.tokens).popitem()) for run in found.runs) == [
        (1, "trace", ("a", (1, 2))), (1, "trace", ("b", (3,))),
    ]  # fmt: skip
