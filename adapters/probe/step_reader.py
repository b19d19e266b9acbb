"""What the logs of :mod:`adapters.probe.steplog` say of a run, read back beside the engine."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.base import Generation, RowSpan, StepRecord, TokenStep


def _events(path: Path, generation: int) -> list[dict[str, Any]]:
    events = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # the worker was killed while it wrote
            event = json.loads(line)
            if event["generation"] == generation:
                events.append(event)
    return events


def _logs(directory: Path, ranks: Collection[int] | None) -> dict[int, Path]:
    """The logs of some ranks, or of all, in order."""
    paths = {int(path.stem.removeprefix("steps-rank")): path for path in directory.glob("steps-rank*.jsonl")}
    return {rank: paths[rank] for rank in sorted(paths) if ranks is None or rank in ranks}


def wait_for_ranks(
    directory: Path, generation: int, seconds: float = 30.0, ranks: Collection[int] | None = None
) -> bool:
    """Wait until every rank has ended the steps of a run that any rank has begun; whether they have.

    The rank that samples answers for all, and another may still be writing what it recorded.

    Args:
        ranks: of one data-parallel group, which steps by itself; all if not given.
    """
    deadline = time.monotonic() + seconds
    while True:
        counts = [
            Counter(event["event"] for event in _events(path, generation)) for path in _logs(directory, ranks).values()
        ]
        begun = max((one["step"] for one in counts), default=0)
        if all(one["end"] == begun for one in counts) or not any(one["end"] for one in counts):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def read_steps(directory: Path, generation: int, ranks: Collection[int] | None = None) -> tuple[StepRecord, ...]:
    """All real steps of one run, of every rank or of some, ranks in order."""
    records = []
    for rank, path in _logs(directory, ranks).items():
        events = _events(path, generation)
        tokens = {event["step"]: event["tokens"] for event in events if event["event"] == "tokens"}
        for event in events:
            if event["event"] != "step":
                continue
            said = tokens.get(event["step"], {})
            records.append(
                StepRecord(
                    step=event["step"],
                    phase=event["phase"],
                    rows=tuple(RowSpan(*row) for row in event["rows"]),
                    forced={name: token["chosen"] for name, token in said.items() if token["forced"]},
                    rank=rank,
                    cycle=event.get("cycle"),
                    mode=event.get("mode", ""),
                )
            )
    return tuple(records)


def read_dummies(directory: Path, generation: int, ranks: Collection[int] | None = None) -> tuple[StepRecord, ...]:
    """Forwards by which ranks without requests kept in lockstep in a run; each is numbered as the real step before."""
    found = []
    for rank, path in _logs(directory, ranks).items():
        last = -1
        for event in _events(path, generation):
            if event["event"] == "step":
                last = event["step"]
            elif event["event"] == "dummy" and event.get("idle"):
                found.append(
                    StepRecord(
                        last, "", (), {}, rank, True,
                        tokens=event["tokens"], cycle=event.get("cycle"), mode=event.get("mode", ""),
                    )
                )  # fmt: skip
    return tuple(found)


def read_generations(
    directory: Path,
    generation: int,
    names: Iterable[str],
    rank: int = 0,
    returned: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Generation, ...]:
    """What was generated in one run, by request, as the sampling rank saw it.

    Args:
        returned: request → ids that the engine returned. They decide between answers to one place: an engine that
            prepares a step while another runs may evict a request whose answer is still to come, drop that, and ask
            again after the request was computed anew.
    """
    steps: dict[str, dict[int, list[TokenStep]]] = {name: {} for name in names}
    for event in _events(directory / f"steps-rank{rank}.jsonl", generation):
        if event["event"] != "tokens":
            continue
        for name, token in event["tokens"].items():
            top = tuple((int(i), float(v)) for i, v in token["top"])
            step = TokenStep(token["chosen"], token["greedy"], top, token["peak"])
            steps[name].setdefault(token["index"], []).append(step)
    return tuple(
        Generation(
            name, tuple(_answer(by_index[index], index, (returned or {}).get(name, ())) for index in sorted(by_index))
        )
        for name, by_index in steps.items()
    )


def _answer(answers: Sequence[TokenStep], index: int, returned: Sequence[int]) -> TokenStep:
    """The one that was appended: the last that the engine returned; the first if that is not known."""
    wanted = returned[index] if index < len(returned) else None
    return next((one for one in reversed(answers) if one.chosen == wanted), answers[0])
