"""A configuration that contradicts its weights is refused before an engine is launched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from align.errors import UserError
from align.models import qwen3
from align.models.info import ModelInfo, read_info
from align.models.shapes import DENSE, architecture, check_shapes, expected


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    qwen3.build(folder, lambda line: None)
    return folder


def edited(preset: Path, folder: Path, **changes: Any) -> ModelInfo:
    shutil.copytree(preset, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return read_info(folder)


def test_the_preset_is_consistent(preset: Path) -> None:
    info = read_info(preset)
    check_shapes(info)
    assert architecture(info) in DENSE
    assert len({name for name, _, _ in expected(info)}) == 2 + 5 * info.layers


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_attention_heads", 8, "num_attention_heads"),
        ("num_key_value_heads", 1, "num_key_value_heads"),
        ("num_hidden_layers", 5, "is not among the weights"),
        ("num_hidden_layers", 3, "more layers than num_hidden_layers=3"),
        ("vocab_size", 999, "vocab_size"),
        ("head_dim", 40, "head_dim"),
        ("intermediate_size", 256, "intermediate_size"),
        ("hidden_size", 128, "hidden_size"),
    ],
)
def test_a_contradiction_is_named(preset: Path, tmp_path: Path, field: str, value: int, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_shapes(edited(preset, tmp_path / "model", **{field: value}))
    assert said in str(caught.value)
    assert "config.json" in caught.value.message
    assert caught.value.hint


def test_other_architectures_are_not_judged(preset: Path, tmp_path: Path) -> None:
    check_shapes(edited(preset, tmp_path / "a", architectures=["MixtralForCausalLM"], num_hidden_layers=9))
    check_shapes(edited(preset, tmp_path / "b", quantization_config={"quant_method": "awq"}, num_hidden_layers=9))
