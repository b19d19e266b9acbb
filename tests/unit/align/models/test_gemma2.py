"""The preset with an attention scale of its own is what transformers reads, and computes as our tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapters.transformers.tensors import fill_window
from align.checkpoints.parameters import parameters
from align.checkpoints.table import structure_of
from align.models import gemma2, qwen3
from align.models.info import read_info
from align.models.shapes import check_shapes
from align.oracle.facts import facts_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma2")
    gemma2.build(folder, lambda line: None)
    return folder


def test_the_files_are_whole_and_every_tensor_has_a_row(built: Path) -> None:
    info = read_info(built)
    check_shapes(info)
    tensors = load_file(built / "model.safetensors")
    known = {one.tensor for one in parameters(structure_of(info.config))}
    assert set(tensors) <= known
    assert all(name.endswith("bias") or name == "lm_head.weight" for name in known - set(tensors))
    behind = tensors["model.layers.0.post_feedforward_layernorm.weight"].float().mean()
    before = tensors["model.layers.0.pre_feedforward_layernorm.weight"].float().mean()
    assert (float(behind), float(before)) == pytest.approx((gemma2.BEHIND, gemma2.BEFORE), abs=0.05)


def test_transformers_takes_every_tensor_and_the_scale(built: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(
        built, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    info = read_info(built)
    facts = facts_of(info.config, structure_of(info.config))
    assert {layer.self_attn.scaling for layer in model.model.layers} == {facts.scale}
    assert facts.scale == pytest.approx(1 / 12) and facts.scale != info.head_dim**-0.5
    assert {window.size for window in facts.windows} == {None}

    # Who knows all 200 tokens sees another first token; nothing is masked.
    fill_window(model.config)
    ids = torch.tensor([qwen3.default_prompts(gemma2.SEED)[-1]])
    other = ids.clone()
    other[0, 0] += 1
    with torch.no_grad():
        before, after = (model.model(rows).last_hidden_state[0] for rows in (ids, other))
        logits = model(ids).logits[0]
    assert bool((before != after).any(-1).all())
    assert 1 < float(logits.std()) < 4
