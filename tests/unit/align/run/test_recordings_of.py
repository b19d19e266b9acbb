"""What a recording consists of, and whether it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.run.recordings import recordings_of
from tests.unit.align.result import made


def test_forwards_are_counted_rank_by_rank_and_dummies_apart(tmp_path: Path, monkeypatch: Any) -> None:
    found = made.Run(tmp_path, monkeypatch).go().report.recordings
    assert set(found) == {"candidate", "reference"}
    for one in found.values():
        assert one.ranks == (0,) and one.steps > 0 and one.damaged == ()
        assert one.to_dict()["ranks"] == [0]


class Entry:
    def __init__(self, step: int, dummy: bool = False) -> None:
        self.step, self.dummy = step, dummy


class Cut:
    """Two ranks; a file of rank 1 cannot be read."""

    ranks = (0, 1)

    def steps(self, rank: int = 0) -> tuple[Entry, ...]:
        return (Entry(0), Entry(1), Entry(1, dummy=True))

    def keys(self, rank: int, step: int) -> frozenset[str]:
        if (rank, step) == (1, 1):
            raise ValueError("rank1/step1 cannot be read: cut")
        return frozenset({"embed"})


def test_a_file_that_cannot_be_read_is_named_and_stops_nothing() -> None:
    side: Any = Cut()
    one = recordings_of({"candidate": side})["candidate"]
    assert (one.ranks, one.steps, one.dummies) == ((0, 1), 4, 2)
    assert one.damaged == ("rank1/step1 cannot be read: cut",)


class Loose(Cut):
    """Files whose content is no tensor were noted when they were read."""

    unreadable = {Path("a.pt"): "holds no tensor"}  # noqa: RUF012


def test_files_that_hold_no_tensor_are_damaged_too() -> None:
    side: Any = Loose()
    assert recordings_of({"reference": side})["reference"].damaged[0] == "a.pt holds no tensor"
