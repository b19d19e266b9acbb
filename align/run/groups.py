"""A side with several data-parallel groups: one engine host for each, called all at once and answering as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adapters.base import EngineSpec, Observation, RunResult
from adapters.host import Failure, Launched
from adapters.probe.live import RANKS_DIFFER
from align.run.transport import Host, Pending

#: What an engine says of the groups that there are, and of its own number among them.
_COUNTS = {"dp": "dp_rank", "worker_dp": "worker_dp_rank"}


class GroupHost:
    """A :class:`align.run.transport.Host` of several; the n-th is data-parallel group n.

    All get the same arguments, but for the specification of an engine, which says which group it is.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)

    def call(self, method: str, *args: Any) -> GroupCall:
        calls = []
        for rank, host in enumerate(self._hosts):
            given = [replace(one, dp_rank=rank) if isinstance(one, EngineSpec) else one for one in args]
            calls.append(host.call(method, *given))
        return GroupCall(method, calls)


class GroupCall:
    """A :class:`align.run.transport.Pending` of several: there when all are, or when one has failed."""

    def __init__(self, method: str, calls: Sequence[Pending], clock: Callable[[], float] = time.monotonic) -> None:
        self._method, self._calls, self._clock = method, tuple(calls), clock
        self._answers: dict[int, Any] = {}

    def poll(self, seconds: float) -> bool:
        deadline = self._clock() + seconds
        while True:
            for number, call in enumerate(self._calls):
                if number not in self._answers and call.poll(seconds / (4 * len(self._calls))):
                    self._answers[number] = call.result()
            if len(self._answers) == len(self._calls) or self._failure() is not None:
                return True
            if self._clock() >= deadline:
                return False

    def _failure(self) -> Failure | None:
        """The first group's that failed, told with its number; the others may wait for it for ever."""
        for number, answer in sorted(self._answers.items()):
            if isinstance(answer, Failure):
                return replace(answer, message=f"data-parallel rank {number}: {answer.message}")
        return None

    def result(self) -> Any:
        failure = self._failure()
        if failure is not None:
            return failure
        answers = [self._answers[number] for number in sorted(self._answers)]
        if self._method in ("generate", "replay"):
            return merge_results(answers)
        if self._method == "launch":
            return merge_launched(answers)
        if self._method == "observe":
            return merge_observations(answers)
        return answers[0]


def merge_results(results: Sequence[RunResult]) -> RunResult:
    """What the groups computed at the same time. Generations stand group by group."""
    return RunResult(
        generations=tuple(generation for one in results for generation in one.generations),
        steps=tuple(step for one in results for step in one.steps),
        seconds=max(one.seconds for one in results),
        run=results[0].run,
    )


def merge_launched(launched: Sequence[Launched]) -> Launched:
    """The first host; the others are among its workers."""
    first, *others = launched
    pids = [*first.workers, *(pid for one in others for pid in (one.pid, *one.workers))]
    return replace(first, workers=tuple(dict.fromkeys(pids)))


def merge_observations(groups: Sequence[Sequence[Observation]]) -> list[Observation]:
    """One observation per setting: the value if all groups agree.

    A group that had no requests knows nothing of sampling; what the others say then counts. Engines of independent
    groups each know of one group: the numbers by which they were told apart say how many there are.
    """
    tables = [{one.name: one for one in group} for group in groups]
    merged = []
    for name in dict.fromkeys(one.name for group in groups for one in group):
        known = {number: table[name] for number, table in enumerate(tables) if name in table}
        first = next(iter(known.values()))
        unread = next((one for one in known.values() if one.value is None), None)
        if name in _COUNTS and unread is None and all(one.value == 1 for one in known.values()):
            merged.append(_counted(name, tables) or first)
        elif unread is not None:
            merged.append(unread)
        elif all(one.value == first.value for one in known.values()):
            merged.append(first)
        else:
            value = {f"group {number}": one.value for number, one in known.items()}
            merged.append(Observation(name, value, first.where, RANKS_DIFFER))
    return merged


def _counted(name: str, tables: Sequence[dict[str, Observation]]) -> Observation | None:
    """How many independent groups there are, if each has a number of its own."""
    numbers = [table.get(_COUNTS[name]) for table in tables]
    found = [one for one in numbers if one is not None]
    if sorted(str(one.value) for one in found) != sorted(map(str, range(len(tables)))):
        return None
    where = f"{found[0].where} of {len(found)} engines, each a group of its own"
    return Observation(name, len(found), where)
