"""Sizes are halved until nothing is said twice in a row, and a series that was stopped goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.drill.campaign import summary
from align.drill.document import render
from align.drill.library import Fault, read_fault, read_faults
from align.drill.sweep import limits, next_of
from align.drill.trials import halved, sweeps
from align.errors import UserError
from tests.unit.align.drill.test_campaign import FACTS, record

ENGINES = {"candidate": "lmdeploy", "reference": "vllm"}
TEXT = '''"""A title."""
FAULT = {
    "path": "B", "kind": "operator", "source": "somewhere", "engines": ["vllm"],
    "draws": {"factor": [1.25, 2.0, 1.5], "layer": [0, 1]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"factor": 2.0, "layer": 0}
def apply(ctx):
    pass
'''


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    (tmp_path / "mine.py").write_text(TEXT)
    return read_fault(tmp_path / "mine.py")


def run(fault: Fault, threshold: float, done: dict[str, Any], most: int = 99) -> list[float]:
    """The sizes that are tried where all above a threshold are found."""
    tried: list[float] = []
    while len(tried) < most and (trial := next_of(fault, "reference", "vllm", 3, done)) is not None:
        size = float(trial.drawn["factor"])
        tried.append(size)
        found = size - 1 > threshold
        done[trial.id] = {"score": {"found": found, "right": found and size > 1.2}}
    return tried


def test_the_largest_size_is_halved_until_two_are_silent(fault: Fault) -> None:
    assert run(fault, 0.1, {}) == [2.0, 1.5, 1.25, 1.125, 1.0625, 1.03125]
    assert len(run(fault, 0.0, {})) == 12, "a fault that is always found ends too"


def test_a_series_goes_on_where_it_was_stopped(fault: Fault) -> None:
    done: dict[str, Any] = {}
    first = run(fault, 0.1, done, most=3)
    assert first + run(fault, 0.1, done) == run(fault, 0.1, {})


def test_all_but_the_size_stays(fault: Fault) -> None:
    trials = [halved(fault, "reference", "vllm", 3, times) for times in range(4)]
    assert len({trial.drawn["layer"] for trial in trials}) == 1 and len({trial.id for trial in trials}) == 4
    assert trials[0].id.startswith("sweep-") and trials[0].sweep


def test_limits(fault: Fault) -> None:
    done: dict[str, Any] = {}
    run(fault, 0.1, done)
    series = sweeps([fault], ENGINES)
    assert series == ((fault, "reference"),)
    (limit,) = limits(series, ENGINES, 3, done)
    assert (limit.name, limit.found, limit.exact, limit.silent) == ("factor", 1.125, 1.25, 1.0625)
    assert limits(series, ENGINES, 3, {}) == ()
    text = render(summary([record("norm_factor")], {**FACTS, "limits": [limit.to_dict()]}))
    assert "## Detection limits" in text and "| mine | reference | factor | 1.125 | 1.25 | 1.0625 |" in text


def test_a_size_must_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for old, new in (('"name": "factor"', '"name": "size"'), ("[1.25, 2.0, 1.5]", '["a", "b"]')):
        path.write_text(TEXT.replace(old, new))
        with pytest.raises(UserError, match="sweep: its name must be one of draws, with numbers"):
            read_fault(path)


def test_several_faults_of_ours_have_a_size() -> None:
    assert len(sweeps(read_faults(), ENGINES)) >= 12
