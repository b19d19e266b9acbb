"""All recordings of a calibration against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from adapters.base import SIDES
from align.calibrate.measure import Sample, measure_operators, measure_pair
from align.calibrate.variants import Variant
from align.compare.policy import TensorPolicy
from align.compare.rows import Recorded
from align.run.judge import one_thread

#: (variant's name, side) → recording.
Recordings = Mapping[tuple[str, str], Recorded]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Numbers:
    """What was measured.

    Attributes:
        sides: between two recordings of engines.
        golden: between one of them and golden.
        operators: what operators of each recording added.
        pairs: which recordings, in words.
    """

    sides: tuple[Sample, ...]
    golden: tuple[Sample, ...]
    operators: tuple[Sample, ...]
    pairs: tuple[str, ...]


def measure_all(
    variants: Sequence[Variant], recordings: Recordings, golden: Mapping[int, Recorded], policy: TensorPolicy, say: Say
) -> Numbers:
    """Measure every pair of :func:`pairs_of`, every side against golden of its group, and every side's operators.

    Raises:
        ValueError: a recording cannot be read.
    """
    labels: list[str] = []
    sides: list[Sample] = []
    far: list[Sample] = []
    operators: list[Sample] = []
    with one_thread():
        for label, one, other in pairs_of(variants):
            say(label)
            labels.append(label)
            sides += measure_pair(label, recordings[one], recordings[other], policy)
        for variant in variants:
            for side in SIDES:
                own = recordings[variant.name, side]
                operators += measure_operators(f"{variant.name} {side}", own)
                if variant.group in golden:
                    label = f"{variant.name} {side} / golden"
                    say(label)
                    labels.append(label)
                    far += measure_pair(label, own, golden[variant.group], policy)
    return Numbers(tuple(sides), tuple(far), tuple(operators), tuple(labels))


def pairs_of(variants: Sequence[Variant]) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Both sides of each run, and each side of a run with the same side of the first run of its group."""
    first: dict[int, Variant] = {}
    for variant in variants:
        one = first.setdefault(variant.group, variant)
        yield f"{variant.name} candidate / reference", (variant.name, SIDES[0]), (variant.name, SIDES[1])
        if one is not variant:
            for side in SIDES:
                yield f"{one.name} / {variant.name} {side}", (one.name, side), (variant.name, side)
