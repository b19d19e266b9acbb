"""The oracle on a layer of experts, recorded from transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from adapters.base import RowSpan
from align.checkpoints.table import Structure
from align.oracle import Oracle, OracleResult
from align.trace.format import MANIFEST, SCHEMA, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter

Tensor = torch.Tensor
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}
STRUCTURE = Structure(
    tags=("all", "gqa", "moe", "shared_experts", "gated_shared_experts"),
    layers=1,
    hidden=32,
    heads=2,
    kv_heads=2,
    head_dim=16,
    intermediate=16,
    experts=8,
    topk=2,
    shared=24,
    vocab=8,
    eps=1e-6,
    rope={"rope_theta": 1e4},
    scale=0.25,
)
_KINDS = ("router_logits", "topk_ids", "topk_weights", "shared_gate", "shared", "routed", "out")
NAMES = [f"layers.0.moe.{one}" for one in _KINDS]
ROWS = 24


def block() -> Any:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(**SIZES, hidden_act="silu")
    config._experts_implementation = "eager"
    module = Qwen2MoeSparseMoeBlock(config).bfloat16()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return module


def save(folder: Path, module: Any) -> Path:
    folder.mkdir()
    prefix, found = "model.layers.0.mlp", {}
    found[f"{prefix}.gate.weight"] = module.gate.weight.data
    found[f"{prefix}.shared_expert_gate.weight"] = module.shared_expert_gate.weight.data
    for part in ("gate", "up", "down"):
        found[f"{prefix}.shared_expert.{part}_proj.weight"] = getattr(module.shared_expert, f"{part}_proj").weight.data
    for index in range(8):
        gate, up = module.experts.gate_up_proj.data[index].chunk(2)
        for part, tensor in (("gate", gate), ("up", up), ("down", module.experts.down_proj.data[index])):
            found[f"{prefix}.experts.{index}.{part}_proj.weight"] = tensor
    save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    return folder


def record(folder: Path, module: Any, wrong: str = "") -> Trace:
    x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        logits = torch.nn.functional.linear(x, module.gate.weight)
        _, weights, ids = module.gate(x)
        used, scores = ids.clone(), logits.float().softmax(-1)
        if wrong == "replayed":  # the other side's choice was used for one token
            used[5] = torch.tensor([one for one in range(8) if one not in ids[5]][: ids.shape[1]])
            weights[5] = (scores[5, used[5]] / scores[5, used[5]].sum()).to(weights.dtype)
        ids, own = used, ids
        routed = module.experts(x, ids, weights)
        gate, shared = module.shared_expert_gate(x), module.shared_expert(x)
    by_expert = torch.zeros(ROWS, 8).scatter_(1, ids, weights.float())
    if wrong == "ids":
        ids = (ids + 1) % 8
    if wrong == "weights":
        by_expert *= 1.03
    if wrong == "experts":  # two experts took each other's tokens
        routed[3] = routed[4]
    values = {
        "layers.0.mlp_norm": x,
        "layers.0.moe.router_logits": logits,
        "layers.0.moe.topk_ids": ids,
        "layers.0.moe.topk_weights": by_expert,
        "layers.0.moe.shared_gate": gate,
        "layers.0.moe.shared": shared,
        "layers.0.moe.routed": routed,
        "layers.0.moe.out": routed + torch.sigmoid(gate) * shared,
    }
    if wrong == "replayed":
        values["layers.0.moe.topk_ids"], values["layers.0.moe.topk_ids#used"] = own, used
    writer = TraceWriter(folder, 0)
    writer.write_step(StepEntry(step=0, phase="prefill", rows=(RowSpan("a", 0, ROWS),)), values)
    writer.close()
    about = {"schema": SCHEMA, "dtype": "bfloat16", "model": {**SIZES, "hidden_act": "silu"}, "layout": {"tp": 1}}
    (folder / MANIFEST).write_text(json.dumps(about), encoding="utf-8")
    return Trace(folder)


def judged(folder: Path, wrong: str = "") -> dict[str, OracleResult]:
    module = block()
    with Oracle(record(folder / "trace", module, wrong), save(folder / "model", module), structure=STRUCTURE) as oracle:
        return {result.name.removeprefix("layers.0.moe."): result for result in oracle.judge(NAMES)}


def test_right_experts_are_within(tmp_path: Path) -> None:
    results = judged(tmp_path)
    assert {name: result.verdict for name, result in results.items()} == dict.fromkeys(results, "within")
    assert [result.operator for result in results.values()] == [
        "linear", "topk_ids", "topk_weights", "linear", "gated_mlp", "expert_mix", "gated_add",
    ]  # fmt: skip
    assert all(result.rows == ROWS and result.complete for result in results.values())
    assert results["topk_ids"].bit_equal
    assert all(json.dumps(result.to_dict(), allow_nan=False) for result in results.values())


@pytest.mark.parametrize(
    ("wrong", "accused"),
    # What 3 % of the weights does to the mix is within what an expert's unseen products may round.
    [("ids", {"topk_ids", "topk_weights", "routed"}), ("weights", {"topk_weights"})],
)
def test_a_wrong_choice_and_wrong_weights(tmp_path: Path, wrong: str, accused: set[str]) -> None:
    results = judged(tmp_path, wrong)
    found = {name for name, result in results.items() if result.verdict == "beyond"}
    assert found == accused
    if wrong == "ids":
        assert "one that was left out beats it by" in results["topk_ids"].why
        assert results["topk_ids"].worst is not None


def test_where_the_routing_was_replayed_experts_are_those_that_were_used(tmp_path: Path) -> None:
    """The router's own choice is judged by itself."""
    results = judged(tmp_path, "replayed")
    assert {name: result.verdict for name, result in results.items()} == dict.fromkeys(results, "within")
    assert results["topk_ids"].bit_equal


def test_tokens_of_another_expert_are_found(tmp_path: Path) -> None:
    results = judged(tmp_path, "experts")
    assert {name for name, result in results.items() if result.verdict == "beyond"} == {"routed"}
    worst = results["routed"].worst
    assert worst is not None and worst.row.position == 3
