"""Facts on their way from the workers to the driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.base import Observation
from adapters.probe.live import (
    LIVE,
    RANKS_DIFFER,
    SAMPLING,
    START,
    Facts,
    OncePerRun,
    merge_ranks,
    one_or_all,
    read_live,
    worker_observations,
    write_facts,
    write_live,
)


def seen(name: str, value: object, why: str = "") -> Observation:
    return Observation(name, value, f"where {name} is", why)


def test_what_is_written_is_read_by_rank(tmp_path: Path) -> None:
    written = {rank: (seen("heads", 4), seen("shape", [2, rank]), seen("eps", None, "gone")) for rank in (10, 2, 0)}
    for rank, facts in written.items():
        write_live(tmp_path, rank, facts)
    assert read_live(tmp_path) == written
    assert list(read_live(tmp_path)) == [0, 2, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"live-rank{rank}.json" for rank in (0, 10, 2)]


def test_writing_again_replaces(tmp_path: Path) -> None:
    write_live(tmp_path, 0, [seen("a", 1), seen("b", 2)])
    write_live(tmp_path, 0, [seen("a", 3)])
    assert read_live(tmp_path) == {0: (seen("a", 3),)}


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """The name appears with its whole content: a failed write leaves the old facts."""
    write_live(tmp_path, 0, [seen("a", 1)])
    with pytest.raises(TypeError):
        write_live(tmp_path, 0, [seen("a", object())])
    assert read_live(tmp_path) == {0: (seen("a", 1),)}


def test_what_cannot_be_read_says_why_and_stops_nothing() -> None:
    facts = Facts()
    facts.read("gone", "model.gone", lambda: dict[str, int]()["eps"])
    facts.read("nothing", "model.nothing", lambda: None)
    facts.read("there", "model.there", lambda: 0)
    assert facts.found == [
        Observation("gone", None, "model.gone", "KeyError: 'eps'"),
        Observation("nothing", None, "model.nothing", "model.nothing is not there"),
        Observation("there", 0, "model.there"),
    ]
    json.dumps([fact.value for fact in facts.found])


def test_ranks_that_agree_say_one_thing() -> None:
    merged = merge_ranks({0: [seen("heads", 4)], 1: [seen("heads", 4)]}, range(2))
    assert merged == [seen("heads", 4)]


def test_ranks_that_differ_are_told_apart() -> None:
    (merged,) = merge_ranks({0: [seen("eps", 1e-6)], 1: [seen("eps", 1e-5)]}, range(2))
    assert merged.value == {"rank 0": 1e-6, "rank 1": 1e-5}
    assert merged.why == RANKS_DIFFER


def test_a_silent_rank_makes_a_fact_unreadable() -> None:
    (absent,) = merge_ranks({0: [seen("heads", 4)]}, range(2))
    assert absent.value is None and absent.why == "rank 1 did not report it"
    (unread,) = merge_ranks({0: [seen("heads", 4)], 1: [seen("heads", None, "no such attribute")]}, range(2))
    assert unread.value is None and unread.why == "no such attribute"


def test_all_kinds_reach_the_driver_and_sampling_may_be_of_one_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_facts(tmp_path, LIVE, rank, [seen("heads", 4)])
        write_facts(tmp_path, START, rank, [seen("dummy_forwards", 1)])
    write_facts(tmp_path, SAMPLING, 1, [seen("greedy", True)])
    found = {fact.name: fact.value for fact in worker_observations(tmp_path, range(2))}
    assert found == {"heads": 4, "dummy_forwards": 1, "greedy": True}
    assert worker_observations(tmp_path / "nowhere", range(2)) == []


def test_one_value_or_the_distinct_ones() -> None:
    assert one_or_all([3, 3, 3]) == 3
    assert one_or_all([3, 1, 3]) == [1, 3]
    assert one_or_all([]) is None


def test_the_first_step_of_each_run_is_let_through() -> None:
    once = OncePerRun()
    assert [once.first(generation) for generation in (1, 1, 2, 2, 2, 3)] == [True, False, True, False, False, True]
