"""When it begins: faults put into the prefill, the first decode step, or later ones are told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.base import RowSpan
from align.compare.policy import TensorPolicy
from align.compare.tensors import compare_traces
from align.walk.phases import STAGES, Phases, phases_of
from tests.unit.align.compare import traces

NAME = "layers.1.mlp.up"
#: r0 has 3 prompt tokens and r1 has 2: one prefill, then two decode steps.
STEPS = (*traces.STEPS, ("decode", (RowSpan("r1", 3, 1), RowSpan("r0", 4, 1))))


def phases(tmp_path: Path, wrong: Callable[[str, int], bool]) -> Phases:
    def edit(phase: str, step: int, tensors: dict[str, Any]) -> None:
        if wrong(phase, step):
            tensors[NAME] = tensors[NAME] * 2

    sides = {
        "candidate": traces.write(tmp_path / "candidate", steps=STEPS, edit=edit),
        "reference": traces.write(tmp_path / "reference", steps=STEPS),
    }
    policy = TensorPolicy.derived("bfloat16", 2)
    return phases_of(NAME, None, sides, compare_traces(sides["candidate"], sides["reference"], policy))


@pytest.mark.parametrize(
    ("wrong", "onset"),
    [
        (lambda phase, step: False, None),
        (lambda phase, step: True, "prefill"),
        (lambda phase, step: phase == "prefill", "prefill"),
        (lambda phase, step: phase == "decode", "decode 1"),
        (lambda phase, step: step == 2, "decode N"),
    ],
)
def test_onset(tmp_path: Path, wrong: Callable[[str, int], bool], onset: str | None) -> None:
    found = phases(tmp_path, wrong)
    assert found.onset == onset
    before = STAGES[: STAGES.index(onset)] if onset else STAGES
    assert all(found.states[stage] in ("equal", "within") for stage in before)
    assert found.to_dict()["onset"] == onset
