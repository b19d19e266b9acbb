"""Several engine hosts that answer as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.base import EngineSpec, Generation, Observation, RunResult, StepRecord, TokenStep
from adapters.host import Failure, Launched
from adapters.probe.live import RANKS_DIFFER
from align.run.groups import GroupCall, GroupHost, merge_launched, merge_observations, merge_results
from align.run.transport import HostDied


class Answer:
    """A pending answer that is there from the n-th look on."""

    def __init__(self, value: Any, looks: int = 0) -> None:
        self._value, self._looks = value, looks

    def poll(self, seconds: float) -> bool:
        self._looks -= 1
        if self._looks < 0 and isinstance(self._value, Exception):
            raise self._value
        return self._looks < 0

    def result(self) -> Any:
        return self._value


class Host:
    def __init__(self, value: Any = None) -> None:
        self.value, self.calls = value, []  # type: tuple[Any, list[tuple[Any, ...]]]

    def call(self, method: str, *args: Any) -> Answer:
        self.calls.append((method, *args))
        return Answer(self.value)


SPEC = EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w", tp=2, dp=2)
LAUNCHED = Launched(10, (11, 12), "/python", "3.11", {"torch": "2"}, True)


def test_each_host_hears_which_group_it_is_and_all_else_alike() -> None:
    hosts = [Host(), Host()]
    group = GroupHost(hosts)
    group.call("launch", SPEC)
    group.call("generate", ("r0", "r1"), 5)
    assert [host.calls[0][1].dp_rank for host in hosts] == [0, 1]
    assert [list(host.calls[0][1].ranks) for host in hosts] == [[0, 1], [2, 3]]
    assert replace(hosts[1].calls[0][1], dp_rank=0) == SPEC
    assert hosts[0].calls[1] == hosts[1].calls[1] == ("generate", ("r0", "r1"), 5)


def test_the_answer_is_there_when_all_are() -> None:
    call = GroupCall("close", [Answer(None), Answer(None, looks=1000)], clock=iter(range(100)).__next__)
    assert call.poll(0.01) is False
    call = GroupCall("close", [Answer(None), Answer(None, looks=2)], clock=iter(range(100)).__next__)
    while not call.poll(0.01):
        pass
    assert call.result() is None


def test_one_failure_is_enough_and_says_of_which_group() -> None:
    """The other waits for it in a collective, and would never answer."""
    failure = Failure("RuntimeError", "no memory", "Traceback …", hint="shrink it")
    call = GroupCall("launch", [Answer(None, looks=10**9), Answer(failure)])
    assert call.poll(0.01)
    assert call.result() == replace(failure, message="data-parallel rank 1: no memory")


def test_a_host_that_died_is_told_at_once() -> None:
    with pytest.raises(HostDied, match="killed"):
        GroupCall("generate", [Answer(None, looks=10**9), Answer(HostDied("killed"))]).poll(0.01)


def test_results_stand_group_by_group() -> None:
    def result(name: str, rank: int, seconds: float) -> RunResult:
        step = StepRecord(0, "prefill", (), {}, rank)
        return RunResult((Generation(name, (TokenStep(1, 1, ()),)),), (step,), seconds, run=3)

    idle = RunResult((), (), 0.0, 3)
    merged = merge_results([result("r0", 0, 2.0), result("r1", 1, 5.0), idle])
    assert [one.request for one in merged.generations] == ["r0", "r1"]
    assert [one.rank for one in merged.steps] == [0, 1]
    assert (merged.seconds, merged.run) == (5.0, 3)


def test_the_workers_of_all_groups_are_watched() -> None:
    merged = merge_launched([LAUNCHED, replace(LAUNCHED, pid=20, workers=(11, 21))])
    assert (merged.pid, merged.workers) == (10, (11, 12, 20, 21))


def seen(name: str, value: Any, where: str = "there", why: str = "") -> Observation:
    return Observation(name, value, where, why)


def test_groups_that_agree_say_one_thing_and_others_are_told_apart() -> None:
    same, block, rank = merge_observations(
        [
            [seen("eager", True), seen("block_size", 64), seen("dp_rank", 0)],
            [seen("eager", True), seen("block_size", 128), seen("dp_rank", 1)],
        ]
    )
    assert same == seen("eager", True)
    assert (block.value, block.why) == ({"group 0": 64, "group 1": 128}, RANKS_DIFFER)
    assert rank.value == {"group 0": 0, "group 1": 1}


def test_what_one_group_cannot_read_is_not_known_and_idle_groups_know_nothing_of_sampling() -> None:
    eps, greedy = merge_observations(
        [[seen("norm_eps", 1e-6), seen("greedy", True)], [seen("norm_eps", None, why="no such module")]]
    )
    assert (eps.value, eps.why) == (None, "no such module")
    assert greedy == seen("greedy", True)


@pytest.mark.parametrize(
    ("counts", "numbers", "found"),
    [
        ((2, 2), (0, 1), 2),  # lmdeploy: each knows how many there are
        ((1, 1), (0, 1), 2),  # vLLM, dense: each knows its own number alone
        ((1, 1), (0, 0), 1),  # the engines do not know that they are groups
        ((1, 1), (None, None), 1),
    ],
)
def test_independent_groups_are_counted_by_their_numbers(
    counts: tuple[int, int], numbers: tuple[int | None, int | None], found: int
) -> None:
    groups = [
        [seen("dp", count), *([] if number is None else [seen("dp_rank", number)])]
        for count, number in zip(counts, numbers, strict=True)
    ]
    assert merge_observations(groups)[0].value == found
