"""Coverage counts what every step and rank recorded."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from align.checkpoints.table import structure_of
from align.compare.coverage import Coverage, cover, percent_text, recorded_names
from align.trace.format import STEPS_FILE
from align.trace.reader import Trace
from tests.unit.align.compare import traces


def names(tp: int = 1) -> tuple[str, ...]:
    return tuple(str(name) for name in structure_of(traces.CONFIG, tp).names())


def test_everything(tmp_path: Path) -> None:
    trace = traces.write(tmp_path, tp=2)
    found = cover(trace, names(2))
    assert (found.percent, found.missing, found.partial) == (100.0, (), ())
    assert recorded_names(trace) == set(names(2))


def test_logits_on_one_rank_are_enough_and_nothing_else_is(tmp_path: Path) -> None:
    traces.write(tmp_path, tp=2)

    class FirstOnly(Trace):
        def keys(self, rank: int, step: int) -> frozenset[str]:
            return super().keys(rank, step) - ({"logits", "embed"} if rank else set())

    found = cover(FirstOnly(tmp_path), names(2))
    assert found.partial == ("embed",) and found.observed == len(names(2)) - 1


def test_residuals_alone_are_no_observation(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed#res_tok"] = torch.ones(1, 3)
        del tensors["embed"]

    assert cover(traces.write(tmp_path, edit=edit), names()).missing == ("embed",)


def test_the_recorders_reasons(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["embed"]

    traces.write(tmp_path, edit=edit)
    file = tmp_path / "rank0" / STEPS_FILE
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines[1]["failures"] = {"embed": "no such module"}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert cover(Trace(tmp_path), names()).why == (("embed", "no such module"),)


def test_nothing_expected_is_no_pass() -> None:
    assert Coverage(0, 0).percent == 0.0
    assert not Coverage(0, 0).reaches(1e-9) and Coverage(0, 0).reaches(0.0)


@given(st.integers(1, 5000), st.integers(0, 5000))
@example(625, 247)
def test_a_percentage_that_is_said_can_be_demanded(expected: int, observed: int) -> None:
    coverage = Coverage(expected, min(observed, expected))
    said = percent_text(coverage.percent)
    exact = 100 * Fraction(coverage.observed, expected)
    assert exact - Fraction(1, 100) < Fraction(said) <= exact
    assert coverage.reaches(float(said))
    assert (said == "100") == (coverage.observed == expected)
    assert coverage.reaches(100.0) == (coverage.observed == expected)
