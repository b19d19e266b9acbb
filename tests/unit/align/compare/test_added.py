"""Residuals of a trace, judged for each rank and phase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.compare.added import judge_added
from align.compare.residual import ResidualPolicy
from align.trace.format import TOKEN_RESIDUAL, WORST_RESIDUAL
from align.trace.reader import Trace
from tests.unit.align.compare import traces

NAME = "layers.1.mlp_norm"
UNIT = 2.0**-8


def residual(gain: float = 0.0, rows: int = 3, broken: bool = False) -> dict[str, torch.Tensor]:
    """Of an operator whose result is too large by ``gain``, everywhere."""
    squares = torch.full((rows,), 16.0)
    sums = torch.stack([squares * gain**2, squares, squares * gain], 1)
    ratio = float("nan") if broken else gain / UNIT
    return {NAME + TOKEN_RESIDUAL: sums, NAME + WORST_RESIDUAL: torch.tensor([ratio, 2.0, 3.0, float(broken)])}


def write(directory: Path, wrong_phase: str | None = None, wrong_rank: int | None = None) -> Trace:
    def edit(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(residual(0.25 if phase == wrong_phase else 0.0, 5 if phase == "prefill" else 2))

    trace = traces.write(directory, edit=edit, tp=1 if wrong_rank is None else 2)

    class OneRank(Trace):
        def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
            if "#res" in key and wrong_rank is not None:
                return residual(0.25 if rank == wrong_rank else 0.0, 5 if step == 0 else 2)[key]
            return super().tensor(rank, step, key)

    trace.close()
    return OneRank(directory)


def test_a_trace_without_residuals(tmp_path: Path) -> None:
    assert judge_added(traces.write(tmp_path)) == {}


def test_a_right_operator(tmp_path: Path) -> None:
    found = judge_added(write(tmp_path))[NAME]
    assert (found.verdict, found.why) == ("within", "")
    assert [(part.phase, part.rank, part.residual.rows) for part in found.parts] == [
        ("prefill", 0, 5),
        ("decode", 0, 2),
    ]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_fault_of_one_phase(tmp_path: Path, phase: str) -> None:
    found = judge_added(write(tmp_path, wrong_phase=phase))[NAME]
    assert found.verdict == "beyond" and found.worst is not None and found.worst.phase == phase
    assert found.worst.residual.row_name == {"prefill": ("r0", 0), "decode": ("r1", 2)}[phase]
    assert found.worst.residual.operator == "rms_norm"


def test_a_fault_of_one_rank(tmp_path: Path) -> None:
    found = judge_added(write(tmp_path, wrong_rank=1))[NAME]
    assert {part.rank for part in found.parts if part.residual.verdict == "beyond"} == {1}
    assert {part.rank for part in found.parts} == {0, 1}


def test_the_policy_decides(tmp_path: Path) -> None:
    lax = ResidualPolicy.for_dtype("bfloat16")
    bound = lax.operators["rms_norm"]
    raised = type(bound)(**{**bound.__dict__, "max_roundings": 1000.0, "gain_roundings": 1000.0})
    policy = ResidualPolicy("bfloat16", {**lax.operators, "rms_norm": raised})
    assert judge_added(write(tmp_path, wrong_phase="decode"), policy)[NAME].verdict == "within"


def test_a_record_that_cannot_be_read_is_not_observable(tmp_path: Path) -> None:
    write(tmp_path)

    class Damaged(Trace):
        def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
            if key == NAME + WORST_RESIDUAL:
                raise ValueError("the disk is full of holes")
            return super().tensor(rank, step, key)

    found = judge_added(Damaged(tmp_path))[NAME]
    assert (found.verdict, found.why) == ("not observable", "the disk is full of holes")


def test_what_is_not_finite_is_named_by_the_row_of_its_own_step(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(residual(0.001, 5 if phase == "prefill" else 2))
        if phase == "decode":  # the second row of the step, r0 position 3
            tensors[NAME + WORST_RESIDUAL] = torch.tensor([0.0, 1.0, 6.0, 1.0])

    found = judge_added(traces.write(tmp_path, edit=edit))[NAME]
    assert found.worst is not None and found.worst.residual.row_name == ("r0", 3)
    assert "(r0 position 3, channel 6)" in found.why
