"""The calls of one recording as descriptions that ``align fa check`` takes, with what the step and the model say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from align.attention.model import Model
from align.fa.call import Call, call_record
from align.fa.files import Records, Seen


@dataclass(frozen=True)
class Wanted:
    """Which calls; ``None`` and empty for all.

    Attributes:
        operator: its name.
        phase: ``prefill`` or ``decode``.
        run: 0 for the first of a launch (a run generates freely first, and records with hooks later).
    """

    operator: str = ""
    phase: str = ""
    layer: int | None = None
    step: int | None = None
    rank: int | None = None
    run: int | None = None

    def takes(self, seen: Seen, call: Call) -> bool:
        """Whether a call is wanted, whatever its layer."""
        step = seen.step
        return (
            self.operator in ("", call.operator)
            and self.phase in ("", step.phase)
            and self.step in (None, step.step)
            and self.rank in (None, step.rank)
            and self.run in (None, step.run)
        )


@dataclass(frozen=True)
class Extracted:
    """One call; equal ones of other layers and steps are counted with it.

    Attributes:
        call: with its context, of the first layer that made it.
        first: where it was made first.
        layers: of all of them.
        times: layers, steps, runs and ranks.
    """

    call: Call
    first: Seen
    layers: tuple[int, ...]
    times: int

    def to_dict(self) -> dict[str, Any]:
        """The description; ``made`` says where it comes from, and is not read back."""
        step = self.first.step
        made = {
            "rank": step.rank,
            "run": step.run,
            "step": step.step,
            "layers": list(self.layers),
            "times": self.times,
            "at": list(self.first.at),
        }
        return {**call_record(self.call), "made": made}


def extract(records: Records, model: Model, wanted: Wanted = Wanted()) -> tuple[Extracted, ...]:
    """The calls that are wanted, in time, equal ones once."""
    found: dict[Any, Extracted] = {}
    for seen in records.seen:
        call = records.calls[seen.call]
        if not wanted.takes(seen, call):
            continue
        for window, layers in _by_window(seen, model, wanted.layer):
            context = model.context(seen.step, window)
            known = found.get((seen.call, context))
            if known is None:
                described = Call(call.operator, call.arguments, replace(context, layer=min(layers)))
                found[seen.call, context] = Extracted(described, seen, tuple(sorted(layers)), len(layers))
            else:
                every = tuple(sorted({*known.layers, *layers}))
                found[seen.call, context] = replace(known, layers=every, times=known.times + len(layers))
    return tuple(found.values())


def _by_window(seen: Seen, model: Model, layer: int | None) -> Iterator[tuple[int | None, list[int]]]:
    windows: dict[int | None, list[int]] = {}
    for one in seen.layers:
        if layer in (None, one):
            windows.setdefault(model.window(one), []).append(one)
    yield from windows.items()
