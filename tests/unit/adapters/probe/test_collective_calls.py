"""Collectives of two real ranks over gloo: what is recorded of them, and ranks that do not make the same call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from adapters.base import EngineSpec
from adapters.probe.collective_calls import CollectiveRecorder
from adapters.probe.launch import write_launch
from align.collectives.record.files import FOLDER, Records, read_records
from align.collectives.record.mismatch import read_mismatch
from align.collectives.record.types import CollectiveCall
from tests.unit.adapters.probe.ranks import SECONDS, run_ranks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Records:
    directory = tmp_path_factory.mktemp("clean")
    ended = run_ranks("clean", directory)
    assert [one.code for one in ended] == [0, 0], ended
    assert read_mismatch(directory / FOLDER) is None
    records = read_records(directory / FOLDER)
    assert records is not None
    return records


def of(records: Records, rank: int, generation: int) -> list[CollectiveCall]:
    return [call for call in records.calls if call.rank == rank and call.place.generation == generation]


def test_each_function_is_one_call_on_each_rank(recorded: Records) -> None:
    before = {rank: of(recorded, rank, 0) for rank in (0, 1)}
    names = [call.function.removeprefix("torch.distributed.") for call in before[0]]
    assert names[:8] == [
        "all_reduce", "all_gather", "all_gather_into_tensor", "gather", "reduce_scatter_tensor", "all_to_all_single",
        "broadcast", "barrier",
    ]  # fmt: skip
    # An object is gathered by its size and its bytes; then the pair's sum and two barriers. A group of one is no group.
    assert names[8:] == ["all_gather", "all_gather", "all_reduce", "barrier", "barrier"]
    assert names == [call.function.removeprefix("torch.distributed.") for call in before[1]]
    assert recorded.ranks == (0, 1)
    assert recorded.notes == ()


def test_a_call_says_what_it_was(recorded: Records) -> None:
    reduced, gathered, _, to_one, scattered, _, sent, barrier = of(recorded, 1, 0)[:8]
    assert (reduced.operation, reduced.reduce, reduced.dtype, reduced.given) == (
        "all_reduce",
        "max",
        "float32",
        ((4,),),
    )
    assert (gathered.given, gathered.got) == (((4,),), ((4,), (4,)))
    assert (to_one.operation, to_one.root, to_one.got) == ("gather", 1, ((4,), (4,)))
    assert of(recorded, 0, 0)[3].got == ()
    assert (scattered.operation, scattered.reduce, scattered.got) == ("reduce_scatter", "sum", ((2,),))
    assert (sent.root, barrier.dtype, barrier.given) == (1, "", ())
    assert {call.group for call in of(recorded, 1, 0)} == {(0, 1)}
    assert {call.backend for call in of(recorded, 1, 0)} == {"gloo"}
    assert all(call.ended and not call.error for call in recorded.calls)
    assert "ranks.py:" in reduced.site[0]
    assert " clean" in reduced.site[0]


def test_calls_are_counted_over_all_groups_and_in_each(recorded: Records) -> None:
    calls = [call for call in recorded.calls if call.rank == 0]
    assert [call.at for call in calls] == list(range(len(calls)))
    for name in {call.group_name for call in calls}:
        own = [call.in_group for call in calls if call.group_name == name]
        assert own == list(range(len(own)))
    pair = [call for call in calls if call.group_name != calls[0].group_name]
    assert len(pair) == 1


def test_the_place_is_the_forward_and_the_function_of_the_model(recorded: Records) -> None:
    calls = of(recorded, 0, 2)
    assert [(call.place.step, call.operation, call.place.inside, call.where) for call in calls][:5] == [
        (0, "all_reduce", ("layers.0.attn.o",), "layers.0.attn.o"),
        (0, "all_reduce", ("layers.1.attn.o",), "layers.1.attn.o"),
        (0, "broadcast", (), "layers.1.attn.o"),
        (1, "all_reduce", ("layers.0.attn.o",), "layers.0.attn.o"),
        (1, "all_reduce", ("layers.1.attn.o",), "layers.1.attn.o"),
    ]


def test_tensors_are_those_before_and_after(recorded: Records) -> None:
    for rank in (0, 1):
        first, second, sent = of(recorded, rank, 2)[:3]
        assert torch.equal(first.tensors["in.0"], torch.full((1, 4), rank + 1.0))
        assert torch.equal(first.tensors["out.0"], torch.full((1, 4), 3.0))
        assert torch.equal(second.tensors["out.0"], torch.full((1, 4), 6.0))
        assert torch.equal(sent.tensors["in.0"], torch.tensor([rank]))
        assert torch.equal(sent.tensors["out.0"], torch.tensor([0])), "after wait(), not after the call"
        assert first.values
        assert first.checksum_in != first.checksum_out
        assert second.checksum_in == first.checksum_out


def test_a_call_whose_future_is_waited_for_is_recorded_as_well(recorded: Records) -> None:
    for rank in (0, 1):
        sent = of(recorded, rank, 2)[5]
        assert (sent.operation, sent.place.step, sent.why) == ("broadcast", 1, "")
        assert torch.equal(sent.tensors["in.0"], torch.tensor([rank]))
        assert torch.equal(sent.tensors["out.0"], torch.tensor([0]))


def test_runs_that_record_no_tensors_leave_lines_alone(recorded: Records) -> None:
    assert recorded.recordings == {1: "", 2: "trace"}
    for call in recorded.calls:
        if call.place.generation < 2:
            assert not call.values
            assert not call.checksum_in
            assert dict(call.tensors) == {}
    first, second = ([call.where for call in of(recorded, 0, generation)][:6] for generation in (1, 2))
    assert first == second
    assert len(first) == 6


def test_a_skipped_call_is_found_before_the_next_one_is_made(tmp_path: Path) -> None:
    ended = run_ranks("skip", tmp_path)
    assert ended[0].seconds < SECONDS / 2, "it ended, and was not ended"
    found = read_mismatch(tmp_path / FOLDER)
    assert found is not None
    assert found.differ == ("checkpoint",)
    (zero, first), (one, second) = found.calls
    assert (zero, one) == (0, 1)
    assert first is not None
    assert second is not None
    assert (first.where, first.place.step) == ("layers.0.attn.o", 2)
    assert (second.where, second.place.step) == ("layers.1.attn.o", 2)
    assert first.in_group == second.in_group
    assert " forward" in first.site[0]
    finder = ended[found.rank].errors
    assert "CollectiveMismatch: the ranks 0, 1 do not make the same collective" in finder
    assert "rank 0 calls all_reduce of float32 [1, 4] for layers.0.attn.o (run 1, step 2)" in finder
    records = read_records(tmp_path / FOLDER)
    assert records is not None
    open_calls = {call.rank: call.where for call in records.calls if not call.ended}
    assert open_calls == {0: "layers.0.attn.o", 1: "layers.1.attn.o"}


def test_a_call_that_one_rank_makes_more_at_the_end_is_found_too(tmp_path: Path) -> None:
    ended = run_ranks("skip_last", tmp_path)
    assert ended[0].seconds < SECONDS / 2, "it ended, and was not ended"
    found = read_mismatch(tmp_path / FOLDER)
    assert found is not None
    assert found.differ == ("count",)
    (_, first), (_, second) = found.calls
    assert first is not None
    assert first.where == "layers.1.attn.o"
    assert second is None
    assert found.ended is not None
    assert found.ended.step == 2
    assert "rank 1 has ended its forward (run 1, step 2) without another call" in ended[found.rank].errors


def test_what_cannot_be_recorded_is_noted_and_stops_nothing(tmp_path: Path) -> None:
    ended = run_ranks("failing", tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    records = read_records(tmp_path / FOLDER)
    assert records is not None
    assert records.notes == ("a call was not recorded: TypeError: 'NoneType' object is not callable",)


@pytest.mark.parametrize(("wanted", "ranks", "recorded"), [(True, 2, True), (False, 2, False), (True, 1, False)])
def test_it_can_be_turned_off_and_one_rank_has_nobody_to_agree_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, ranks: int, recorded: bool
) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    write_launch(EngineSpec("toy", "candidate", "", "bfloat16", str(tmp_path), collectives=wanted))
    assert (CollectiveRecorder.of_process() is not None) == recorded
    assert (tmp_path / FOLDER).exists() == recorded


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (4, 0)])
def test_ranks_are_global_also_where_each_group_is_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, rank: int
) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    monkeypatch.setenv("ALIGN_DP_RANK", "1")
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    write_launch(EngineSpec("toy", "candidate", "", "bfloat16", str(tmp_path), tp=2, dp=2))
    assert CollectiveRecorder.of_process() is not None
    assert [path.name for path in (tmp_path / FOLDER).glob("*.jsonl")] == [f"rank{rank}.jsonl"]
