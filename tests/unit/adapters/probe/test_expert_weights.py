"""The audit of stacked and transposed experts, as both engines hold them, expert by expert."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adapters.probe.weights import DIFFERS, EQUAL, NOT_OBSERVABLE, PACKED, Audited, LiveWeights
from align.checkpoints.table import Structure, structure_of
from align.collectives.shards import misplaced, shard_findings

EXPERTS, HIDDEN, WIDTH = 4, 6, 5
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "vocab_size": 8,
}
STACKS = {"lmdeploy": ("gate_up.weight", "down.weight"), "vllm": ("w13_weight", "w2_weight")}
AT = "model.layers.0.mlp"


def files() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    found = {
        f"{AT}.experts.{expert}.{part}_proj.weight": torch.randn(shape, generator=generator).bfloat16()
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }
    return found | {f"{AT}.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()}


def stacked(tensors: dict[str, Tensor], engine: str) -> dict[str, Tensor]:
    """What an engine makes of the files on an NPU: all experts in one tensor, transposed."""
    each = [[tensors[f"{AT}.experts.{at}.{part}_proj.weight"] for part in ("gate", "up", "down")] for at in range(4)]
    first, second = STACKS[engine]
    return {
        f"{AT}.experts.{first}": torch.stack([torch.cat(one[:2]).T for one in each]).contiguous(),
        f"{AT}.experts.{second}": torch.stack([one[2].T for one in each]).contiguous(),
        f"{AT}.gate.weight": tensors[f"{AT}.gate.weight"],
    }


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same files with all experts of a layer in one tensor, as transformers 5 writes them."""
    each = [[tensors[f"{AT}.experts.{at}.{part}_proj.weight"] for part in ("gate", "up", "down")] for at in range(4)]
    return {
        f"{AT}.experts.gate_up_proj": torch.stack([torch.cat(one[:2]) for one in each]),
        f"{AT}.experts.down_proj": torch.stack([one[2] for one in each]),
        f"{AT}.gate.weight": tensors[f"{AT}.gate.weight"],
    }


def audit(
    folder: Path,
    live: dict[str, Tensor],
    structure: Structure | None = None,
    rank: int = 0,
    tp_rank: int = 0,
    stored: dict[str, Tensor] | None = None,
) -> dict[str, Audited]:
    save_file({name: one.contiguous() for name, one in (stored or files()).items()}, folder / "model.safetensors")
    model = nn.Module()
    for name, value in live.items():
        owner: nn.Module = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(value.clone(), requires_grad=False))
    records = LiveWeights(model, structure or structure_of(CONFIG), rank, tp_rank).audit(folder)
    return {one.parameter: one for one in records if one.parameter in files()}


@pytest.mark.parametrize("engine", STACKS)
def test_experts_as_loaded_are_equal(tmp_path: Path, engine: str) -> None:
    found = audit(tmp_path, stacked(files(), engine))
    assert found.keys() == files().keys()
    assert {one.status for one in found.values()} == {EQUAL}
    up = found[f"{AT}.experts.2.up_proj.weight"]
    assert (up.kind, up.live) == ("moe.routed", f"{AT}.experts.{STACKS[engine][0]}[2][up]")


@pytest.mark.parametrize("engine", STACKS)
def test_an_expert_that_was_never_loaded_and_one_that_is_anothers(tmp_path: Path, engine: str) -> None:
    live = stacked(files(), engine)
    first, second = (f"{AT}.experts.{one}" for one in STACKS[engine])
    live[first][1] = 0
    live[second][3] = live[second][0].clone()
    found = {name: one for name, one in audit(tmp_path, live).items() if one.status == DIFFERS}
    assert {name: one.holds for name, one in found.items()} == {
        f"{AT}.experts.1.gate_proj.weight": "zeros",
        f"{AT}.experts.1.up_proj.weight": "zeros",
        f"{AT}.experts.3.down_proj.weight": f"{AT}.experts.0.down_proj.weight",
    }


def test_gate_and_up_that_changed_places(tmp_path: Path) -> None:
    live = stacked(files(), "vllm")
    stack = live[f"{AT}.experts.w13_weight"]
    stack[2] = torch.cat([stack[2][:, WIDTH:], stack[2][:, :WIDTH]], dim=1)
    found = {name: one for name, one in audit(tmp_path, live).items() if one.status == DIFFERS}
    names = [f"{AT}.experts.2.{part}_proj.weight" for part in ("gate", "up")]
    assert {name: one.holds for name, one in found.items()} == dict(zip(names, reversed(names), strict=True))


def test_fewer_experts_than_the_files_have_are_not_observable(tmp_path: Path) -> None:
    live = stacked(files(), "lmdeploy")
    for name in STACKS["lmdeploy"]:
        live[f"{AT}.experts.{name}"] = live[f"{AT}.experts.{name}"][:2].contiguous()
    found = {name for name, one in audit(tmp_path, live).items() if one.status == NOT_OBSERVABLE}
    assert found == {f"{AT}.experts.{at}.{part}_proj.weight" for at in (2, 3) for part in ("gate", "up", "down")}


@pytest.mark.parametrize("engine", STACKS)
def test_packed_experts_are_audited_one_by_one(tmp_path: Path, engine: str) -> None:
    """A loader that maps experts one by one copies nothing of a packed file."""
    live = stacked(files(), engine)
    right = audit(tmp_path, live, stored=packed(files()))
    assert right.keys() == files().keys() and {one.status for one in right.values()} == {EQUAL}
    first = f"{AT}.experts.{STACKS[engine][0]}"
    live[first] = torch.zeros_like(live[first])
    found = audit(tmp_path, live, stored=packed(files()))
    for expert in range(EXPERTS):
        for part in ("gate", "up"):
            one = found[f"{AT}.experts.{expert}.{part}_proj.weight"]
            assert (one.status, one.holds, one.rows_total) == (DIFFERS, "zeros", WIDTH)
            assert one.why == f"{PACKED} {AT}.experts.gate_up_proj"
        assert found[f"{AT}.experts.{expert}.down_proj.weight"].status == EQUAL


def spread(rank: int, engine: str = "vllm", order: tuple[int, ...] = (0, 1)) -> dict[str, Tensor]:
    """What one of two ranks holds that share the experts: its two, in this order."""
    whole = stacked(files(), engine)
    held = [2 * rank + at for at in order]
    return {name: value[held] if ".experts." in name else value for name, value in whole.items()}


@pytest.mark.parametrize("engine", STACKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_answers_for_the_experts_that_it_holds(tmp_path: Path, engine: str, rank: int) -> None:
    found = audit(tmp_path, spread(rank, engine), structure_of(CONFIG, 1, 2, 2), rank)
    experts = {name: one for name, one in found.items() if ".experts." in name}
    assert {int(name.split(".")[5]) for name in experts} == {2 * rank, 2 * rank + 1}
    assert {one.status for one in found.values()} == {EQUAL}
    up = experts[f"{AT}.experts.{2 * rank + 1}.up_proj.weight"]
    assert up.live == f"{AT}.experts.{STACKS[engine][0]}[1][up]", "its own number there"


def test_experts_on_each_others_places_are_a_map_and_no_damage(tmp_path: Path) -> None:
    found = audit(tmp_path, spread(1, order=(1, 0)), structure_of(CONFIG, 1, 2, 2), 1)
    wrong = [one for one in found.values() if one.status == DIFFERS]
    assert {(one.parameter.split(".")[5], one.expert_held) for one in wrong} == {("2", 3), ("3", 2)}
    assert all(misplaced(asdict(one)) for one in wrong)
    (finding,) = shard_findings("candidate", [asdict(one) for one in wrong])
    assert (finding.path, finding.kind, finding.checkpoint) == ("C", "expert_map", "layers.0.moe.routed")
    assert finding.ranks == (1,) and finding.evidence["experts"] == {"2": 3, "3": 2}


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_experts_are_split_over_the_ranks_of_all_groups(tmp_path: Path, layout: tuple[int, int]) -> None:
    """Without expert parallelism: by tensor parallelism, and by groups of which each has one rank."""
    tensors = {
        name: value.repeat_interleave(2, 1 if name.endswith("down_proj.weight") else 0)
        if ".experts." in name
        else value
        for name, value in files().items()
    }
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        own = {
            name: value.chunk(2, 1 if name.endswith("down_proj.weight") else 0)[rank] if ".experts." in name else value
            for name, value in tensors.items()
        }
        structure = structure_of({**CONFIG, "moe_intermediate_size": 2 * WIDTH}, *layout)
        tp_rank = rank if layout[0] > 1 else 0
        found = audit(folder, stacked(own, "lmdeploy"), structure, rank, tp_rank, tensors)
        assert {one.status for one in found.values()} == {EQUAL} and len(found) == len(tensors)
