"""Three traces: rows by request and position, what is not observable, damaged records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.golden.compare import compare_golden
from align.golden.judge import GoldenPolicy
from align.trace.reader import Trace
from tests.unit.align.compare import traces

POLICY = GoldenPolicy("bfloat16", 2)
#: Everything in one prefill per request, the requests in another order.
ONE_PREFILL = (("prefill", (RowSpan("r1", 0, 3),)), ("prefill", (RowSpan("r0", 0, 4),)))


def golden(tmp_path: Path, edit: traces.Edit | None = None) -> Trace:
    return traces.write(tmp_path / "golden", steps=ONE_PREFILL, edit=edit)


def test_rows_meet_whatever_the_steps(tmp_path: Path) -> None:
    found = compare_golden(traces.write(tmp_path / "a"), traces.write(tmp_path / "b"), golden(tmp_path), POLICY)
    assert found.rows == 7 and found.first is None
    assert {one.verdict for one in found.checkpoints} == {"alike", "not observable"}
    for one in found.checkpoints:
        if one.verdict == "alike":
            assert one.candidate is not None and one.candidate.rel_l2 == 0.0 and one.rows
    hidden = {one.name: one.why for one in found.checkpoints if one.verdict == "not observable"}
    assert set(hidden) == {"layers.0.attn.kv_start_indices", "layers.1.attn.kv_start_indices"}


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_the_first_departure_is_named_with_its_side(tmp_path: Path, side: str) -> None:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        for name in ("layers.1.mlp.up", "layers.1.mlp.act"):
            tensors[name] = tensors[name] * 2

    sides = {
        "candidate": traces.write(tmp_path / "c", edit=double if side == "candidate" else None, noise=0.002),
        "reference": traces.write(tmp_path / "r", edit=double if side == "reference" else None, noise=0.002, seed=1),
    }
    found = compare_golden(sides["candidate"], sides["reference"], golden(tmp_path), POLICY)
    assert found.first is not None
    assert (found.first.name, found.first.verdict) == ("layers.1.mlp.up", f"{side} further")
    plain = found.to_dict()
    assert plain["first"] == "layers.1.mlp.up" and plain["rows"] == 7


def test_values_that_were_not_kept_are_not_observable(tmp_path: Path) -> None:
    def forget(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.1.mlp.gate"]

    found = compare_golden(
        traces.write(tmp_path / "a", edit=forget), traces.write(tmp_path / "b", noise=0.002), golden(tmp_path), POLICY
    )
    gate = next(one for one in found.checkpoints if one.name == "layers.1.mlp.gate")
    assert gate.verdict == "not observable" and gate.why.startswith("the candidate's values were not kept")
    assert gate.candidate is None and gate.reference is not None and gate.factor is None
    assert gate.reference.rel_l2 is not None and 0 < gate.reference.rel_l2 < 0.01


def test_rows_that_were_fed_other_tokens_are_left_out(tmp_path: Path) -> None:
    def other(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if phase == "decode":
            tensors["token_ids"][0] = 30  # r1 position 2

    found = compare_golden(
        traces.write(tmp_path / "a", edit=other), traces.write(tmp_path / "b"), golden(tmp_path), POLICY
    )
    assert found.rows == 6
    assert found.notes == ("1 rows are left out: a side was fed other tokens there than golden",)


def test_a_bad_record_stops_nothing(tmp_path: Path) -> None:
    class Damaged(Trace):
        def joined(self, step: int, name: str) -> torch.Tensor | None:
            if name == "layers.0.attn.q":
                raise ValueError("the disk is full of holes")
            return super().joined(step, name)

    traces.write(tmp_path / "a").close()
    found = compare_golden(Damaged(tmp_path / "a"), traces.write(tmp_path / "b"), golden(tmp_path), POLICY)
    bad = [one for one in found.checkpoints if one.why == "the disk is full of holes"]
    assert [one.name for one in bad] == ["layers.0.attn.q"] and bad[0].verdict == "not observable"
    assert sum(one.verdict == "alike" for one in found.checkpoints) > 30


def test_ranks_are_joined(tmp_path: Path) -> None:
    sides = traces.write(tmp_path / "a", tp=2), traces.write(tmp_path / "b", tp=2)
    found = compare_golden(*sides, golden(tmp_path), POLICY)
    assert found.first is None
    why = {one.name: one.why for one in found.checkpoints if one.verdict == "not observable"}
    assert why["layers.0.attn.o_partial"] == "golden runs on one rank"
    assert all(one.verdict == "alike" for one in found.checkpoints if one.name.endswith(("attn.q", "mlp.down")))
