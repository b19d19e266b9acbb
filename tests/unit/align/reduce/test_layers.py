"""A checkpoint cut to its first layers, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from align.errors import UserError
from align.models.info import read_info
from align.reduce.layers import cut_layers, weight_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers in two files."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="12KB")
    (folder / "tokenizer.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("layers", [1, 3])
def test_the_first_layers_compute_what_they_did(model: Path, tmp_path: Path, layers: int) -> None:
    out = cut_layers(model, layers, tmp_path / "cut")
    assert read_info(out).layers == layers
    whole, cut = Qwen3ForCausalLM.from_pretrained(model), Qwen3ForCausalLM.from_pretrained(out)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = whole.model(ids, output_hidden_states=True).hidden_states[layers]
        hidden = cut.model.embed_tokens(ids)
        states = cut.model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], hidden)
    # The last state is behind the final norm.
    assert torch.equal(states[-1], cut.model.norm(expected))
    assert (out / "tokenizer.json").is_file()
    assert not (out / "model.safetensors.index.json").exists()


def test_settings_with_an_entry_per_layer_are_cut(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    out = cut_layers(model, 2, tmp_path / "cut")
    found = json.loads((out / "config.json").read_text())
    if "layer_types" in config:
        assert found["layer_types"] == config["layer_types"][:2]
    assert {**found, "num_hidden_layers": 4, "layer_types": config.get("layer_types")} == {
        **config,
        "layer_types": config.get("layer_types"),
    }


def test_what_is_of_no_layer_stays(model: Path, tmp_path: Path) -> None:
    kept = load_file(cut_layers(model, 1, tmp_path / "cut") / "model.safetensors")
    outside = {name for name in kept if ".layers." not in name}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= outside
    assert all(".layers.0." in name for name in set(kept) - outside)


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no"):
        cut_layers(folder, 1, tmp_path / "out")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size
