"""Which trials are made, from a seed: a pure planner."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapters.base import SIDES
from align.drill.library import Fault


@dataclass(frozen=True)
class Expected:
    """What must be said of a trial; ``None`` where nothing is asked."""

    path: str
    kinds: tuple[str, ...]
    side: str
    checkpoint: str | None = None
    layer: int | None = None
    phase: str | None = None
    step: int | None = None
    request: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trial:
    """One fault in one engine, with values that were drawn; or a control without any.

    Attributes:
        fault: its name; empty for a control.
        number: of the trial of this fault and side, from 0.
        side: that has it.
        engine: of that side.
        drawn: values that the patch gets.
        expected: ``None`` for a control: nothing must be said.
        setting: what the engines are launched with, a key of the plan.
        sweep: it is one of a series of halved sizes, which ends in silence; ``number`` counts the halvings.
        benign: of a control, the name of what its sides do differently and may; ``side`` then has its patch, if any.
    """

    fault: str
    number: int
    side: str
    engine: str
    drawn: Mapping[str, Any]
    expected: Expected | None
    setting: str
    sweep: bool = False
    benign: str = ""

    @property
    def id(self) -> str:
        """Unique in a plan, and the same in every run of it."""
        if self.sweep:
            return f"sweep-{self.fault}-{self.side}-{self.number}"
        if self.benign:
            return f"{self.benign}-{self.side}-{self.number}-{self.setting}"
        return f"{self.fault or 'control'}-{self.side}-{self.number}" + ("" if self.fault else f"-{self.setting}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "id": self.id}


def generator(seed: int, *names: Any) -> random.Random:
    """Random numbers of one purpose: adding a fault does not change what others draw."""
    text = "/".join(map(str, (seed, *names)))
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


def draw(fault: Fault, side: str, engine: str, seed: int, number: int, setting: str = "", turn: int = 0) -> Trial:
    """One trial of a fault.

    Args:
        number: of the fault's trials.
        turn: how many of them were on this side: each takes the next value of a shuffled list, so that few trials cover
            different ones.
    """
    chance = generator(seed, fault.name, side)
    drawn = {}
    for name, values in fault.said.draws.items():
        order = list(values)
        chance.shuffle(order)
        drawn[name] = order[turn % len(order)]
    return Trial(fault.name, number, side, engine, drawn, expected_of(fault, side, drawn), setting)


def expected_of(fault: Fault, side: str, drawn: Mapping[str, Any]) -> Expected:
    """What must be said, with what was drawn filled in."""
    said = fault.said

    def whole(value: int | str | None) -> int | None:
        return int(value.format(**drawn)) if isinstance(value, str) else value

    return Expected(
        said.path,
        said.kinds,
        side,
        None if said.checkpoint is None else said.checkpoint.format(**drawn),
        whole(said.layer),
        said.phase,
        whole(said.step),
        whole(said.request),
        said.ranks,
    )


def plan(faults: Iterable[Fault], engines: Mapping[str, str], seed: int, trials: int) -> tuple[Trial, ...]:
    """``trials`` of every fault, in turn on the sides whose engine can have it.

    Args:
        engines: role → engine.
    """
    found = []
    for fault in faults:
        sides = [side for side in SIDES if engines[side] in fault.said.engines]
        generator(seed, fault.name, "sides").shuffle(sides)
        for number in range(trials):
            side = sides[number % len(sides)]
            found.append(draw(fault, side, engines[side], seed, number, turn=number // len(sides)))
    return tuple(found)


def sweeps(faults: Iterable[Fault], engines: Mapping[str, str]) -> tuple[tuple[Fault, str], ...]:
    """Faults with a size, with each side whose engine can have them."""
    return tuple(
        (fault, side)
        for fault in faults
        if fault.said.sweep is not None
        for side in SIDES
        if engines[side] in fault.said.engines
    )


def halved(fault: Fault, side: str, engine: str, seed: int, times: int) -> Trial:
    """The fault with its largest size, halved so many times towards none."""
    sweep = fault.said.sweep
    assert sweep is not None
    first = draw(fault, side, engine, seed, 0)
    largest = max((float(one) for one in fault.said.draws[sweep.name]), key=lambda one: abs(one - sweep.neutral))
    drawn = {**first.drawn, sweep.name: sweep.neutral + (largest - sweep.neutral) / 2**times}
    return replace(first, number=times, drawn=drawn, expected=expected_of(fault, side, drawn), sweep=True)


def patch_text(fault: Fault, trial: Trial) -> str:
    """The fault's file with what was drawn; a patch for ``align run --patch`` as it stands."""
    return f"{fault.text.rstrip()}\n\n\n# What this trial drew.\nDRAWN.update({dict(trial.drawn)!r})\n"


def quick(trials: Sequence[Trial], count: int, seed: int) -> tuple[Trial, ...]:
    """A few of them: as many faults as possible, sides in turn."""
    chance = generator(seed, "quick")
    names = sorted({one.fault for one in trials})
    chance.shuffle(names)
    chosen = []
    for at, name in enumerate(names[:count]):
        of_it = [one for one in trials if one.fault == name]
        chosen.append(of_it[at % len(of_it)])
    return tuple(chosen)
