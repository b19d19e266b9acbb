"""What was written of calls is read back, whole or cut."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.collectives.record.files import (
    Begin,
    CollectiveWriter,
    End,
    Follower,
    Fresh,
    Mark,
    Note,
    Run,
    rank_file,
    read_records,
)
from align.collectives.record.types import OPERATIONS, CollectiveCall, Place
from tests.unit.align.collectives.parted import call

WORDS = st.text("abc.:/ _é", max_size=8)
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=2).map(tuple)
PLACES = st.builds(
    Place, generation=st.integers(0, 3), step=st.integers(-1, 9), dummy=st.booleans(),
    inside=st.lists(WORDS, max_size=2).map(tuple), after=WORDS,
)  # fmt: skip
CALLS = st.builds(
    CollectiveCall, rank=st.just(2), at=st.just(0), in_group=st.integers(0, 9),
    group=st.lists(st.integers(0, 7), max_size=3).map(tuple), group_name=WORDS, backend=WORDS,
    operation=st.sampled_from(OPERATIONS), function=WORDS, dtype=WORDS, given=SHAPES, got=SHAPES, place=PLACES,
    reduce=WORDS, root=st.none() | st.integers(0, 7), site=st.lists(WORDS, max_size=2).map(tuple),
    checksum_in=st.sampled_from(["", "00ff"]),
)  # fmt: skip
ENDS = st.none() | st.builds(
    End, at=st.just(0), checksum_out=st.sampled_from(["", "ff00"]), why=WORDS, error=WORDS
)  # fmt: skip
TENSORS = {"in.0": torch.arange(3), "out.0": torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16)}


@given(given_calls=st.lists(st.tuples(CALLS, ENDS, st.booleans()), max_size=5))
@settings(max_examples=60, deadline=None)
def test_calls_are_read_as_they_were_written(given_calls: list[tuple[CollectiveCall, End | None, bool]]) -> None:
    expected: list[CollectiveCall] = []
    kept: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        writer = CollectiveWriter(Path(folder), 2)
        for at, (one, end, values) in enumerate(given_calls):
            begun = replace(one, at=at, ended=False)
            writer.begin(begun)
            if end is None:
                expected.append(begun)
            else:
                size = writer.end(replace(end, at=at), TENSORS if values else None)
                assert (size > 0) == values
                expected.append(
                    replace(
                        begun, ended=not end.error, error=end.error, checksum_out=end.checksum_out, values=values,
                        why=end.why,
                    )
                )  # fmt: skip
            kept.append(values and end is not None)
        writer.close()
        records = read_records(Path(folder))
        assert records is not None
        assert records.calls == tuple(expected)
        assert records.ranks == (2,)
        for one, values in zip(records.calls, kept, strict=True):
            assert set(one.tensors) == (set(TENSORS) if values else set())
            for name, tensor in one.tensors.items():
                assert tensor.dtype == TENSORS[name].dtype
                assert torch.equal(tensor.nan_to_num(7.0), TENSORS[name].nan_to_num(7.0))


def write(directory: Path) -> CollectiveWriter:
    writer = CollectiveWriter(directory, 0)
    writer.run(Run(1, "trace"))
    writer.begin(call(0, "embed", 0, at=0))
    writer.end(End(0, "aa"), TENSORS)
    writer.mark(Mark(((0, 1), "3"), 1, Place(1, 0)))
    writer.begin(call(0, "embed", 1, at=1))
    return writer


def test_whoever_follows_sees_each_line_once_as_soon_as_it_is_written(tmp_path: Path) -> None:
    follower = Follower(rank_file(tmp_path, 0))
    assert list(follower.news()) == []
    writer = write(tmp_path)
    run, begin, end, mark, second = follower.news()
    assert run == Run(1, "trace")
    assert begin == Begin(call(0, "embed", 0, at=0))
    assert isinstance(end, End)
    assert (end.at, end.checksum_out, end.values) == (0, "aa", True)
    assert mark == Mark(((0, 1), "3"), 1, Place(1, 0))
    assert second == Begin(call(0, "embed", 1, at=1))
    writer.note("x")
    assert list(follower.news()) == [Note("x")]
    follower.close()


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.close()
    data = rank_file(tmp_path, 0).read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"")
    follower, seen = Follower(cut), []
    for start in range(0, len(data), 7):
        with cut.open("ab") as file:
            file.write(data[start : start + 7])
        seen += list(follower.news())
    whole = Follower(rank_file(tmp_path, 0))
    assert seen == list(whole.news())
    follower.close()
    whole.close()


def test_a_worker_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    write(tmp_path).close()
    path = rank_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-5])
    records = read_records(tmp_path)
    assert records is not None
    assert [(one.at, one.ended) for one in records.calls] == [(0, True)]


def test_runs_and_notes_are_read(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.note("x")
    writer.note("y")
    writer.note("x")
    writer.close()
    records = read_records(tmp_path)
    assert records is not None
    assert records.recordings == {1: "trace"}
    assert records.notes == ("x", "y")
    assert records.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_what_calls_have_in_common_is_told_once(tmp_path: Path) -> None:
    writer = CollectiveWriter(tmp_path, 0)
    for at in range(100):
        writer.begin(call(0, f"layers.{at}.attn.o", at, at=at))
        writer.end(End(at))
    writer.close()
    assert rank_file(tmp_path, 0).stat().st_size < 100 * 130
    records = read_records(tmp_path)
    assert records is not None
    assert [one.where for one in records.calls] == [f"layers.{at}.attn.o" for at in range(100)]


def test_nothing_was_recorded(tmp_path: Path) -> None:
    assert read_records(tmp_path) is None
    assert read_records(tmp_path / "absent") is None


@pytest.mark.parametrize("line", ["{", '{"begin":5}', '{"surprise":1}', "[]", '{"end":9}'])
def test_a_damaged_file_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path).close()
    path = rank_file(tmp_path, 0)
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"rank0\.jsonl cannot be read"):
        read_records(tmp_path)


def test_a_damaged_tensor_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path).close()
    (tmp_path / "rank0.bin").write_bytes(b"short")
    records = read_records(tmp_path)
    assert records is not None
    tensors: Any = records.calls[0].tensors
    with pytest.raises(ValueError, match=r"rank0\.bin cannot be read"):
        tensors["in.0"]


def test_calls_of_an_earlier_experiment_are_read_by_its_ranks_alone(tmp_path: Path) -> None:
    """Another rank goes on counting; who reads the records afterwards sees the last experiment, and its tensors."""
    writer, other = CollectiveWriter(tmp_path, 0), Follower(rank_file(tmp_path, 0))
    old, new = (
        replace(call(0, "attn.o"), at=0, in_group=0, ended=False),
        replace(call(0, "attn.o"), at=2, in_group=2, ended=False),
    )
    late = replace(old, at=1, in_group=1)
    writer.begin(old)
    size = writer.end(End(0), TENSORS)
    writer.begin(late)
    writer.note("no ranks are known")
    writer.fresh(Fresh(2))
    writer.end(End(1))
    writer.begin(new)
    assert writer.end(End(2), {"in.0": torch.arange(5)}) > 0
    records = read_records(tmp_path)
    assert records is not None and [one.at for one in records.calls] == [2]
    assert records.calls[0].tensors["in.0"].tolist() == [0, 1, 2, 3, 4]
    assert records.notes == ("no ranks are known",)
    assert rank_file(tmp_path, 0).with_suffix(".bin").stat().st_size < 2 * size
    assert [one.call.in_group for one in other.news() if isinstance(one, Begin)] == [0, 1, 2]
