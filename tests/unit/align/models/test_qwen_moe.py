"""The presets with experts are what transformers reads, whole and different from layer to layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from align.checkpoints.parameters import parameters
from align.checkpoints.table import structure_of
from align.models import qwen_moe
from align.models.info import read_info
from align.models.presets import PRESETS
from align.models.resolve import resolve_model
from align.models.shapes import check_shapes

BUILDERS = {"qwen3-moe": qwen_moe.build_qwen3_moe, "qwen2-moe": qwen_moe.build_qwen2_moe}


@pytest.fixture(scope="module", params=BUILDERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    BUILDERS[request.param](folder, lambda line: None)
    return folder


def test_the_files_are_whole_and_every_tensor_has_a_row(built: Path) -> None:
    info = read_info(built)
    check_shapes(info)
    tensors = load_file(built / "model.safetensors")
    known = {one.tensor for one in parameters(structure_of(info.config))}
    assert set(tensors) <= known
    assert all(name.endswith("bias") for name in known - set(tensors))
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    first, second = (tensors[f"model.layers.0.mlp.experts.{at}.up_proj.weight"] for at in (0, 1))
    assert not torch.equal(first, second)


def test_transformers_takes_every_tensor_and_uses_several_experts(built: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(
        built, dtype=torch.float32, output_loading_info=True, config=AutoConfig.from_pretrained(built)
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    seen: list[torch.Tensor] = []
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda module, args, result: seen.append(args[0].flatten(0, -2) @ module.weight.T))
    with torch.no_grad():
        logits = model(torch.arange(3, 103)[None]).logits
    assert bool(logits.isfinite().all())
    assert len(seen[0].topk(2).indices.unique()) == qwen_moe.EXPERTS


def test_a_name_with_an_underscore_is_the_same_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    assert resolve_model("qwen3_moe").name == "qwen3-moe"
    assert len({PRESETS[name].key for name in (*BUILDERS, "qwen3")}) == 3
