"""The preset with a sliding window is what transformers reads, and its window is what our tables say it is."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align.checkpoints.parameters import parameters
from align.checkpoints.table import structure_of
from align.models import mistral, qwen3
from align.models.info import read_info
from align.models.shapes import check_shapes
from align.oracle.facts import facts_of


def test_the_files_are_whole_and_transformers_takes_them(tmp_path: Path) -> None:
    mistral.build(tmp_path, lambda line: None)
    info = read_info(tmp_path)
    check_shapes(info)
    structure = structure_of(info.config)
    known = {one.tensor for one in parameters(structure)}
    tensors = set(load_file(tmp_path / "model.safetensors"))
    assert tensors <= known and all(name.endswith("bias") for name in known - tensors)
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]

    # The first token is seen by the rows of its window, and by no row behind it.
    window = structure.window
    assert window == mistral.WINDOW and {one.size for one in facts_of(info.config, structure).windows} == {window}
    assert min(qwen3.PROMPT_LENGTHS) < window < max(qwen3.PROMPT_LENGTHS)
    ids = torch.arange(3, 3 + window + 20)[None]
    other = ids.clone()
    other[0, 0] = 500
    with torch.no_grad():
        before, after = (model.model(rows, output_hidden_states=True).hidden_states[1][0] for rows in (ids, other))
    changed = (before != after).any(-1)
    assert bool(changed[:window].all()) and not bool(changed[window:].any())
