"""What a change of one layer's exchange does, on engines that are no more than their functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.drill.experts import Change, Layer, exchanged, operator_result, stacks
from adapters.probe.patch import PatchContext

Tensor = torch.Tensor
ROWS = torch.arange(12.0).view(6, 2)
SEEN: dict[str, Any] = {}


def mc2(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, renormalize: bool, x_active_mask: Tensor
) -> Tensor:
    if renormalize:
        topk_weights.div_(topk_weights.sum(-1, keepdim=True))
    SEEN.update(weights=topk_weights.clone(), ids=topk_ids, mask=x_active_mask)
    import dlinfer.vendor.ascend.moe as module

    made: Tensor = module.apply_mlp(hidden_states, "up", "down", torch.tensor([2, 4]), 0)
    return made


def apply_mlp(hidden_states: Tensor, gate_up: Any, down: Any, group_list: Tensor, group_list_type: int = 1) -> Tensor:
    SEEN["given"] = hidden_states
    return hidden_states + 100


class Impl:
    def forward(self, weights: Tensor, ids: Tensor) -> Tensor:
        import dlinfer.vendor.ascend.moe as module

        result: Tensor = module.fused_moe_mc2(ROWS, weights, ids, True, torch.tensor([True, False]))
        return result


@pytest.fixture
def ctx(monkeypatch: pytest.MonkeyPatch) -> PatchContext:
    """lmdeploy with two layers."""
    SEEN.clear()
    for name in ("dlinfer", "dlinfer.vendor", "dlinfer.vendor.ascend"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = ModuleType("dlinfer.vendor.ascend.moe")
    module.fused_moe_mc2 = module.fused_moe_naive = module.fused_moe_all2all = mc2
    module.apply_mlp = apply_mlp
    monkeypatch.setitem(sys.modules, "dlinfer.vendor.ascend.moe", module)
    monkeypatch.setattr(sys.modules["dlinfer.vendor.ascend"], "moe", module, raising=False)
    weights = SimpleNamespace(weight=SimpleNamespace(data=torch.ones(2, 3, 4)))
    layers = [
        SimpleNamespace(mlp=SimpleNamespace(experts=SimpleNamespace(impl=Impl(), gate_up=weights, down=weights)))
        for _ in range(2)
    ]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    return PatchContext("candidate", "lmdeploy", 1, 1, 0, 1, (2, 1, 2), model=model)


def run(ctx: PatchContext, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer gives, and the router's weights and ids afterwards."""
    weights, ids = torch.tensor([[1.0, 3.0]]), torch.tensor([[4, 5]])
    result: Tensor = ctx.model.model.layers[layer].mlp.experts.impl.forward(weights, ids)
    return result, weights, ids


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ids": lambda ids: ids % 4,
    "weights": torch.square,
    "mask": torch.ones_like,
    "given": lambda rows: rows.roll(1, 0),
    "made": lambda rows: rows * 0,
    "result": lambda rows: -rows,
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_thing_changes_in_one_layer_and_the_router_knows_nothing_of_it(name: str, ctx: PatchContext) -> None:
    right = run(ctx, 0)[0]
    usual = dict(SEEN)
    exchanged(ctx, 1, Change(**{name: CHANGES[name]}))
    assert torch.equal(run(ctx, 0)[0], right)
    result, weights, ids = run(ctx, 1)
    assert weights.tolist() == [[0.25, 0.75]] and ids.tolist() == [
        [4, 5]
    ]  # what the router gave, renormalised in place
    expected = {**usual, **({name: CHANGES[name](usual[name])} if name in ("ids", "weights", "mask") else {})}
    for key in ("ids", "weights", "mask"):
        assert torch.equal(SEEN[key], expected[key]), key
    front, behind = result[:4], result[4:]
    assert torch.equal(behind, -right[4:] if name == "result" else right[4:])  # rows that nobody sent
    changed = {"given": right[:4].roll(1, 0), "made": right[:4] * 0, "result": -right[:4]}
    assert torch.equal(front, changed.get(name, right[:4]))
    ctx.undo()
    assert torch.equal(run(ctx, 1)[0], right) and torch.equal(SEEN["weights"], usual["weights"])


def test_an_operator_is_wrong_in_its_layer_alone(ctx: PatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    npu: Any = ModuleType("torch_npu")
    npu.npu_double = lambda one: 2 * one
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    monkeypatch.setattr(torch.ops.npu, "npu_double", npu.npu_double, raising=False)
    monkeypatch.setattr(Impl, "forward", lambda self: npu.npu_double(1) + torch.ops.npu.npu_double(10))
    layer = Layer(1)
    operator_result(ctx, layer, "npu_double", lambda one: one + 1)
    layer.mark(ctx)
    assert [ctx.model.model.layers[one].mlp.experts.impl.forward() for one in (0, 1)] == [22, 24]
    ctx.undo()
    assert ctx.model.model.layers[1].mlp.experts.impl.forward() == 22


def test_the_weights_are_those_of_the_layer(ctx: PatchContext) -> None:
    first, second = stacks(ctx, 1)
    assert first.shape == second.shape == (2, 3, 4)
