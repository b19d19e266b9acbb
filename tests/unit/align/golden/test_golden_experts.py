"""Golden of models with experts: its checkpoints by their formulas, and the experts that it is told to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.transformers.tensors import ABSENT
from align.checkpoints import recompute
from align.checkpoints.routing import routing_of
from align.checkpoints.table import structure_of
from align.compare.rows import RowKey
from align.golden.compare import compare_golden
from align.golden.experts import digest_of, experts_of, first_apart, used_by
from align.golden.judge import GoldenPolicy
from align.golden.record import Followed, already, load_model, record
from align.models.info import ModelInfo
from align.trace.format import USED
from align.trace.reader import Trace
from tests.unit.align.compare import traces
from tests.unit.align.compare.test_routes import AT, CONFIG, near, spoiled
from tests.unit.align.golden import tiny

EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"norm_topk_prob": True, "head_dim": 8},
    "Qwen2Moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 20},
}
IDS = (3, 60, 11, 2, 8, 1, 4)
Model = tuple[ModelInfo, Any, Path]


def sequence(experts: dict[int, torch.Tensor] | None = None) -> Followed:
    return Followed("r0", IDS[:5], IDS[5:], experts or {})


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    info = tiny.build(folder / "model", request.param, **EXPERTS, **KINDS[request.param])
    return info, load_model(info), folder


def recorded(model: Model, name: str, experts: dict[int, torch.Tensor] | None = None) -> Trace:
    info, loaded, folder = model
    return record(loaded, info, (sequence(experts),), folder / name)


def at(trace: Trace, name: str, layer: int = 1) -> torch.Tensor:
    found = trace.joined(0, f"layers.{layer}.{name}")
    assert found is not None, name
    return found.double()


def obeys(trace: Trace, model: Model, ids: torch.Tensor) -> None:
    """Each operator of layer 1 again, from the checkpoints that it reads, in float64."""
    info, loaded, _ = model
    routing = routing_of(info.config)
    assert routing is not None
    mlp = loaded.model.layers[1].mlp
    x, logits, weights = (at(trace, name) for name in ("mlp_norm", "moe.router_logits", "moe.topk_weights"))

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)

    def expert(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate, up = mlp.experts.gate_up_proj[index].detach().chunk(2)
        return gate, up, mlp.experts.down_proj[index].detach()

    close(logits, x @ mlp.gate.weight.detach().double().T)
    close(weights, recompute.expert_weights(logits.float(), ids, routing, torch.float64).value)
    close(at(trace, "moe.routed"), recompute.expert_mix(x.float(), ids, weights, expert, compute=torch.float64).value)
    whole = at(trace, "moe.routed")
    if hasattr(mlp, "shared_expert"):
        whole = whole + torch.sigmoid(at(trace, "moe.shared_gate")) * at(trace, "moe.shared")
        close(at(trace, "moe.shared_gate"), x @ mlp.shared_expert_gate.weight.detach().double().T)
    close(at(trace, "moe.out"), whole)
    final = trace.joined(0, "final_in")
    assert final is not None
    close(final.double(), at(trace, "mid") + at(trace, "moe.out"))


def test_checkpoints_obey_their_formulas(model: Model) -> None:
    trace = recorded(model, "own")
    names = {str(name): name for name in structure_of(model[0].config).names()}
    wanted = {text for text, name in names.items() if name.kind.name not in ABSENT}
    assert trace.keys(0, 0) == wanted | {"token_ids", "positions"}
    obeys(trace, model, at(trace, "moe.router_logits").topk(2).indices)
    with torch.no_grad():
        plain = model[1](torch.tensor([IDS])).logits[0]
    logits = trace.joined(0, "logits")
    assert logits is not None
    torch.testing.assert_close(logits, plain[4:], atol=1e-5, rtol=1e-5)


def test_a_router_follows_the_experts_that_it_is_given(model: Model) -> None:
    """In one layer; the last row leaves the choice to the router."""
    own = at(recorded(model, "own"), "moe.router_logits").topk(2).indices.sort(-1).values
    given = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2], [0, 2], [1, 3], [-1, -1]])
    assert not bool((given[:6] == own[:6]).all())
    trace = recorded(model, "given", {1: given})
    ids = given.clone()
    ids[6] = at(trace, "moe.router_logits").topk(2).indices[6]
    obeys(trace, model, ids)


def test_a_recording_with_other_experts_is_another_one(model: Model) -> None:
    info, _, folder = model
    given = {1: torch.tensor([[0, 1]] * 7)}
    recorded(model, "again", given).close()
    found = already(folder / "again", info, (sequence(given),))
    assert found is not None
    found.close()
    assert already(folder / "again", info, (sequence(),)) is None
    assert already(folder / "again", info, (sequence({1: given[1].flip(0) + 1}),)) is None
    assert digest_of(given) != digest_of({0: given[1]})


# --------------------------------------------------------------------------------------------------------- the sides


def test_what_a_side_used_counts_and_not_what_its_router_chose(tmp_path: Path) -> None:
    def replayed(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        spoiled()(phase, step, tensors)
        tensors[AT[1] + USED] = torch.tensor([[1, 2]]).repeat(len(tensors[AT[1]]), 1)

    own, used = (
        used_by(traces.write(tmp_path / name, edit=edit, config=CONFIG))
        for name, edit in (("own", spoiled()), ("used", replayed))
    )
    key = RowKey("r0", 1, 0)
    assert (own[1][key].tolist(), used[1][key].tolist()) == ([1, 3], [1, 2])
    assert first_apart(own, used) == {"r0": 1} and first_apart(used, used) == {}
    whole = experts_of(own, "r0", 6)
    assert whole[1].tolist() == [[1, 2], [1, 3], [1, 2], [1, 2], [-1, -1], [-1, -1]]
    assert experts_of(own, "r9", 6) == {}


def test_a_dense_model_uses_none(tmp_path: Path) -> None:
    assert used_by(traces.write(tmp_path)) == {}


def test_rows_behind_different_experts_are_left_out(tmp_path: Path) -> None:
    sides = [
        traces.write(tmp_path / name, edit=edit, config=CONFIG)
        for name, edit in (("candidate", spoiled()), ("reference", near), ("golden", near))
    ]
    found = compare_golden(sides[0], sides[1], sides[2], GoldenPolicy("bfloat16", 3))
    assert found.rows == 4, "r0 from position 1 on is left out"
    assert "3 rows are left out" in found.notes[0] and "--replay-routing always" in found.notes[0]
    assert compare_golden(sides[1], sides[1], sides[2], GoldenPolicy("bfloat16", 3)).rows == 7
