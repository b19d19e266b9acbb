"""A diagnosis names the guilty side, the channels and the kind of fault; a wrong accusation is not confirmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from align.checkpoints import recompute
from align.sentences import text_of
from align.walk.diagnosis import Diagnosis, diagnose
from tests.unit.adapters.probe.dense_engine import CONFIG, GEMMA, DenseEngine
from tests.unit.align.oracle.recorded_side import STEPS, record, save_checkpoint

Tensor = torch.Tensor
Edit = Callable[[int, dict[str, Tensor]], None]
#: 40 prompt tokens of each request, then the decode steps.
LONG = tuple(tuple(replace(span, count=40) if span.start == 0 else span for span in step) for step in STEPS[:1])
NAME = "layers.1.mlp.down"


def diagnosed(
    tmp_path: Path,
    name: str,
    edit: Edit | None,
    side: str | None = None,
    wrong: str = "candidate",
    config: dict[str, Any] = CONFIG,
) -> Any:
    model = save_checkpoint(tmp_path / "model", DenseEngine(config=config))
    traces = {
        role: record(
            tmp_path / role, DenseEngine(native=role == "candidate", config=config), LONG,
            edit=edit if role == wrong else None, model_dir=model,
        )
        for role in ("candidate", "reference")
    }  # fmt: skip
    return diagnose(name, side, traces)


def rows_times(rows: list[int], factor: float) -> Edit:
    def edit(step: int, tensors: dict[str, Tensor]) -> None:
        tensors[NAME] = tensors[NAME].clone()
        tensors[NAME][:, rows] = (tensors[NAME][:, rows].float() * factor).to(tensors[NAME].dtype)

    return edit


@pytest.mark.parametrize("wrong", ["candidate", "reference"])
@pytest.mark.parametrize(("rows", "factor"), [([5], 1.05), ([5], 1.02), ([1, 4, 7, 11, 20, 33, 40, 47], 1.05)])
def test_rows_that_are_too_large(tmp_path: Path, wrong: str, rows: list[int], factor: float) -> None:
    found = diagnosed(tmp_path, NAME, rows_times(rows, factor), wrong=wrong)
    assert found.side == wrong
    assert f"the {wrong}'s operator errs" in found.why
    assert found.kind == "factor_channels"
    assert found.fits[0].parameters["channels"] == rows
    assert found.fits[0].parameters["ratio"] == pytest.approx(factor, abs=2e-3)
    assert set(found.channels) <= set(rows)
    other = "reference" if wrong == "candidate" else "candidate"
    assert (found.sides[wrong].verdict, found.sides[other].verdict) == ("beyond", "within")


def exchanged(step: int, tensors: dict[str, Tensor]) -> None:
    gate, up = "layers.1.mlp.gate", "layers.1.mlp.up"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def test_exchanged_tensors_are_found(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "layers.1.mlp.gate", exchanged)
    assert (found.side, found.kind) == ("candidate", "exchanged")
    assert found.fits[0].parameters["other"] == "layers.1.mlp.up"


def broken(step: int, tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = tensors[NAME].clone()
    tensors[NAME][0, 3] = torch.nan


def test_what_is_not_finite(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, NAME, broken)
    assert (found.side, found.kind) == ("candidate", "nonfinite")


@pytest.mark.parametrize("side", [None, "candidate", "reference"])
@pytest.mark.parametrize("name", [NAME, "layers.0.attn.out", "layers.2.mlp_norm", "logits", "layers.1.attn.q_rope"])
def test_right_operators_are_not_accused(tmp_path: Path, name: str, side: str | None) -> None:
    """Also where somebody said so."""
    found = diagnosed(tmp_path, name, None, side)
    assert found.side is None
    assert found.fits == ()
    assert "neither side errs" in found.why


def test_a_wrong_accusation_is_put_right(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, NAME, rows_times([5], 1.05), side="reference")
    assert found.side == "candidate"


def last_request_scaled(step: int, tensors: dict[str, Tensor]) -> None:
    """Attention of the second request of a step alone, with scores times 0.3 instead of 0.25."""
    at = "layers.1.attn."
    query, keys, values = (tensors[at + one][40:] for one in ("q_rope", "key_states", "value_states"))
    found = recompute.attention(query, torch.arange(len(query)), keys, values, 0.3, None).value
    tensors[at + "out"] = torch.cat((tensors[at + "out"][:40], found.to(query.dtype)))


def test_attention_is_explained_in_the_request_that_is_wrong(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "layers.1.attn.out", last_request_scaled)
    assert (found.side, found.kind) == ("candidate", "attention_scale")
    assert found.fits[0].parameters["scale"] == pytest.approx(0.3, rel=0.02)


def one_left_out(step: int, tensors: dict[str, Tensor]) -> None:
    at = "layers.1.attn."
    weight = DenseEngine(config=GEMMA).weights.of[("attn.post_norm", 1)]
    found = recompute.rms_norm(tensors[at + "o"], weight, GEMMA["rms_norm_eps"]).value
    tensors[at + "post_norm"] = found.to(weight.dtype)


def test_a_gemma_norm_that_forgets_the_one(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "layers.1.attn.post_norm", one_left_out, config=GEMMA)
    assert (found.side, found.kind) == ("candidate", "norm_weight")
    assert found.fits[0].parameters["formula"] == "weight - 1 instead of weight"


def test_what_was_not_recorded_is_not_observable(tmp_path: Path) -> None:
    def without(step: int, tensors: dict[str, Tensor]) -> None:
        tensors.pop("layers.1.mlp.act")

    found = diagnosed(tmp_path, NAME, without)
    assert found.side is None
    assert "the candidate's is not observable" in found.why


def test_plain_data(tmp_path: Path) -> None:
    found: Diagnosis = diagnosed(tmp_path, NAME, rows_times([5], 1.05))
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["kind"] == "factor_channels"
    assert plain["fits"][0]["sentence"]["zh"]
    assert plain["channels_of"] == 48 and plain["channels_total"] == 1
    assert text_of(plain["told"], "zh") == "以其自身输入计算，候选侧的算子有误；另一侧在界限之内"
    assert text_of(plain["fits"][0]["told"], "zh").startswith("通道 5 为期望值的 1.0")
    assert text_of(plain["fits"][0]["told"]) == plain["fits"][0]["text"]
    assert plain["sides"]["candidate"]["verdict"] == "beyond"
