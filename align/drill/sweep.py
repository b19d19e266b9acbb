"""How small a fault may be and still be found: its size is halved until nothing is said of it any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from align.drill.library import Fault
from align.drill.trials import Trial, halved

#: A series ends at the second silence in a row, or after so many halvings.
_SILENCES, _MOST = 2, 12


def next_of(fault: Fault, side: str, engine: str, seed: int, done: Mapping[str, Mapping[str, Any]]) -> Trial | None:
    """The next trial of a series; ``None`` if it has ended.

    Args:
        done: id → what came of a trial, as a journal has it.
    """
    silent = 0
    for times in range(_MOST):
        trial = halved(fault, side, engine, seed, times)
        record = done.get(trial.id)
        if record is None:
            return trial
        silent = 0 if record["score"]["found"] else silent + 1
        if silent == _SILENCES:
            return None
    return None


@dataclass(frozen=True)
class Limit:
    """What a series came to.

    Attributes:
        name: of the number that was halved.
        found: the smallest size of which anything was said; ``None`` if nothing ever was.
        exact: the smallest of which everything was said as it must be.
        silent: the largest of which nothing was said; ``None`` if it was found to the end.
    """

    fault: str
    side: str
    name: str
    found: float | None
    exact: float | None
    silent: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return dict(vars(self))


def limits(
    series: Sequence[tuple[Fault, str]], engines: Mapping[str, str], seed: int, done: Mapping[str, Mapping[str, Any]]
) -> tuple[Limit, ...]:
    """Of all series that were begun."""
    found = []
    for fault, side in series:
        sweep = fault.said.sweep
        assert sweep is not None
        trials = [halved(fault, side, engines[side], seed, times) for times in range(_MOST)]
        records = [(float(one.drawn[sweep.name]), done[one.id]["score"]) for one in trials if one.id in done]
        if records:
            found.append(
                Limit(
                    fault.name,
                    side,
                    sweep.name,
                    _last(records, lambda score: bool(score["found"])),
                    _last(records, lambda score: bool(score["right"])),
                    next((size for size, score in records if not score["found"]), None),
                )
            )
    return tuple(found)


def _last(records: Sequence[tuple[float, Any]], holds: Callable[[Any], bool]) -> float | None:
    """The smallest size before the first of which it does not hold."""
    last = None
    for size, score in records:
        if not holds(score):
            break
        last = size
    return last
