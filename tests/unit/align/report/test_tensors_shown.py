"""What is said about tensors: coverage, the first divergent checkpoint, the worst of each layer."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from align.checkpoints.table import structure_of
from align.compare.metrics import Metrics
from align.compare.policy import TensorPolicy
from align.compare.tensors import CheckpointComparison, TensorComparison, compare_traces
from align.findings import Finding
from align.report import tensors as shown
from tests.unit.align.compare import traces


def compared(tmp_path: Path, edit: traces.Edit | None = None, policy: Any = None) -> TensorComparison:
    pair = traces.write(tmp_path / "a", edit=edit), traces.write(tmp_path / "b")
    return compare_traces(*pair, policy or TensorPolicy.derived("bfloat16", 2))


def text(found: TensorComparison, *findings: Finding, verbose: bool = False) -> str:
    out = io.StringIO()
    shown.show_tensors(Console(file=out, width=200, emoji=False), found, findings, verbose)
    return out.getvalue()


def row(said: str, place: str) -> list[str]:
    (line,) = [line for line in said.splitlines() if line.startswith(place)]
    return line.removeprefix(place).split()


def test_equal_traces(tmp_path: Path) -> None:
    said = text(compared(tmp_path))
    assert "coverage: candidate 100 % of 40, reference 100 % of 40, paired 100 % of 40 checkpoints" in said
    assert "first divergent" not in said
    assert row(said, "layer 1") == ["18", "-", "-", "-", "-", "-", "equal"]


def test_a_fault_names_checkpoint_and_numbers(tmp_path: Path) -> None:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.gate"] = tensors["layers.1.mlp.gate"] * 2

    found = compared(tmp_path, double)
    said = text(found)
    assert "first divergent checkpoint: layers.1.mlp.gate (its inputs are equal)" in said
    # Twice the value: the difference is the value itself.
    structure = structure_of(traces.CONFIG)
    right = [traces.step_tensors(structure, spans)["layers.1.mlp.gate"].bfloat16() for _, spans in traces.STEPS]
    largest = max(float(tensor.abs().max()) for tensor in right)
    assert (
        f"layers.1.mlp.gate: max abs {largest:.4g}, max rel 1, cosine 1 (the alignment guide's thresholds: fails)"
        in said
    )
    assert row(said, "layer 1") == ["17", "-", "1", "-", "mlp.gate", "1", "beyond"]
    assert row(said, "layer 0")[-1] == "equal"


def test_the_numbers_are_those_of_the_headline(tmp_path: Path) -> None:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        for name in ("layers.0.mlp.up", "layers.1.mlp.gate"):
            tensors[name] = tensors[name] * 2

    said = text(compared(tmp_path, double), Finding("B", "operator", checkpoint="layers.1.mlp.gate"))
    assert "first divergent checkpoint: layers.0.mlp.up" in said
    assert "layers.1.mlp.gate: max abs" in said


def test_an_accused_row_is_marked_although_it_is_within(tmp_path: Path) -> None:
    def nudge(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.gate"] = tensors["layers.1.mlp.gate"] * 1.01

    found = compared(tmp_path, nudge)
    said = text(found, Finding("B", "operator", side="candidate", checkpoint="layers.1.mlp.gate"))
    assert row(said, "layer 1")[-3:] == ["within,", "accused:", "mlp.gate"]
    assert row(said, "layer 0")[-1] == "equal"
    assert "accused: layers.1.mlp.gate (within). These are two tests" in said
    assert "accused" not in text(found)


def test_an_accused_row_that_is_beyond_needs_no_explanation(tmp_path: Path) -> None:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.gate"] = tensors["layers.1.mlp.gate"] * 2

    said = text(compared(tmp_path, double), Finding("B", "operator", checkpoint="layers.1.mlp.gate"))
    assert row(said, "layer 1")[-3:] == ["beyond,", "accused:", "mlp.gate"]
    assert "two tests" not in said


def test_an_accused_layer_in_the_middle_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traces.CONFIG, "num_hidden_layers", 30)
    found = compared(tmp_path)
    assert "layer 17" not in text(found)
    assert row(text(found, Finding("B", "weights", checkpoint="layers.17.mlp.up")), "layer 17")[-2:] == [
        "accused:",
        "mlp.up",
    ]


def test_what_was_not_observed_is_no_pass(tmp_path: Path) -> None:
    def without(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("layers.1.")]:
            del tensors[name]

    said = text(compared(tmp_path, without))
    assert "not observable on the candidate: layers.1.block_in, " in said
    assert " and 14 more" in said
    assert "not observable on the reference" not in said
    assert row(said, "layer 1") == ["-", "-", "-", "18", "-", "-", "not", "observable"]


def test_what_both_sides_recorded_and_was_not_compared(tmp_path: Path) -> None:
    def narrower(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.mlp.up"] = tensors["layers.0.mlp.up"][:, :5].contiguous()

    said = text(compared(tmp_path, narrower))
    assert "coverage: candidate 100 % of 40, reference 100 % of 40, paired 97.5 % of 40 checkpoints" in said
    assert "not compared: layers.0.mlp.up (shapes differ: [7, 5] and [7, 24])" in said


def test_integers_have_no_distance(tmp_path: Path) -> None:
    def shifted(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.kv_start_indices"] = tensors["layers.0.attn.kv_start_indices"] + 1

    said = text(compared(tmp_path, shifted))
    assert "layers.0.attn.kv_start_indices: 7 rows differ and must be equal" in said


def test_many_layers_show_both_ends_and_what_is_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traces.CONFIG, "num_hidden_layers", 30)

    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.17.mlp.gate"] = tensors["layers.17.mlp.gate"] * 2

    found = compared(tmp_path, double)
    said = text(found)
    assert row(said, "layer 17")[-1] == "beyond"
    assert "layer 16" not in said
    lines = said.splitlines()
    where = [line.split("  ")[0] for line in lines[next(i for i, one in enumerate(lines) if "where" in one) + 1 :]]
    assert where[:10] == [
        "embed", "layer 0", "layer 1", "layer 2", "… 14 more", "layer 17", "… 11 more", "layer 29", "final_in",
        "final_norm",
    ]  # fmt: skip
    assert "--verbose shows every layer" in said and "--verbose" not in text(found, verbose=True)
    assert "layer 16" in text(found, verbose=True)


def test_rows_without_a_partner_are_counted_by_reason(tmp_path: Path) -> None:
    assert "rows: 7 compared\n" in text(compared(tmp_path / "whole"))
    pair = traces.write(tmp_path / "a"), traces.write(tmp_path / "b", steps=traces.STEPS[:1])
    found = compare_traces(*pair, TensorPolicy.derived("bfloat16", 2))
    assert "rows: 5 compared; without a partner: 2 only on the candidate\n" in text(found)
    out = io.StringIO()
    shown.show_tensors(Console(file=out, width=200), found, surplus={"candidate": 2, "reference": 0})
    assert "2 only on the candidate (computed ahead, behind the last token that was asked for)\n" in out.getvalue()


def test_a_verdict_that_rests_on_digests_says_so() -> None:
    near = CheckpointComparison("layers.0.attn.q", "within", "", layer=0, estimated=True)
    assert shown._estimated("within", [near]) == "*"
    far = replace(near, verdict="beyond", estimated=False)
    assert shown._estimated("beyond", [near, far]) == ""
    assert shown._estimated("within", [near, replace(near, estimated=False)]) == "*"


def test_digests_alone_are_one_short_sentence_and_no_cut_cell(tmp_path: Path) -> None:
    whole = compared(tmp_path)
    metrics = Metrics(False, None, None, 0.0017, None, None, None, None, 0, 0)
    ones = [replace(one, verdict="within", metrics=metrics, estimated=True, rows=3) for one in whole.checkpoints]
    lean = replace(whole, checkpoints=tuple(ones))
    out = io.StringIO()
    accused = Finding("B", "operator", side="candidate", checkpoint="layers.1.mlp.gate")
    shown.show_tensors(Console(file=out, width=80, emoji=False), lean, [accused])
    said = out.getvalue()
    assert "layers.1.mlp.gate: relative L2 0.0017, estimated from digests of 3 rows" in said
    assert "not known" not in said
    assert row(said, "layer 1")[-3:] == ["within*,", "accused:", "mlp.gate"]
    assert "* estimated: 40 of 40 checkpoints were compared by digests of 3 of 7 rows" in said
