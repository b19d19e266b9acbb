"""Packed experts read by their usual names, in both orders of axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from align.checkpoints.packed import unpacked

EXPERTS, INNER, HIDDEN = 3, 4, 10
PREFIX = "model.layers.1.mlp.experts"
GATE, UP = torch.randn(EXPERTS, INNER, HIDDEN), torch.randn(EXPERTS, INNER, HIDDEN)
DOWN = torch.randn(EXPERTS, HIDDEN, INNER)


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    handle = safe_open(folder / "model.safetensors", framework="pt")
    return dict.fromkeys(tensors, handle)


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("turned", [False, True])
def test_each_expert_has_its_own_matrices(turned: bool, suffix: str, tmp_path: Path) -> None:
    both, down = torch.cat([GATE, UP], 1), DOWN
    if turned:
        both, down = both.mT, down.mT
    files = opened(tmp_path, {f"{PREFIX}.gate_up_proj{suffix}": both, f"{PREFIX}.down_proj{suffix}": down})
    found = unpacked(files)
    assert len(found) == 3 * EXPERTS
    for expert in range(EXPERTS):
        for part, whole in (("gate", GATE), ("up", UP), ("down", DOWN)):
            name = f"{PREFIX}.{expert}.{part}_proj.weight"
            one = found[name]
            assert one.get_slice(name).get_shape() == list(whole[expert].shape)
            assert torch.equal(one.get_tensor(name), whole[expert])
            assert torch.equal(one.get_slice(name)[1:3], whole[expert][1:3])
            assert torch.equal(one.get_slice(name)[1:3, 2:4], whole[expert][1:3, 2:4])
    assert found[f"{PREFIX}.0.up_proj.weight"].tensor == f"{PREFIX}.gate_up_proj{suffix}"


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{PREFIX}.0.gate_proj.weight": GATE[0]},
        {f"{PREFIX}.gate_up_proj": torch.cat([GATE, UP], 1)},  # no down
        {f"{PREFIX}.gate_up_proj": torch.cat([GATE, UP], 1), f"{PREFIX}.down_proj": DOWN[:, :3]},
        {f"{PREFIX}.gate_up_proj": torch.cat([GATE, UP], 1)[0], f"{PREFIX}.down_proj": DOWN[0]},
    ],
)
def test_what_is_not_packed_so_is_left_alone(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert unpacked(opened(tmp_path, tensors)) == {}
