"""What happens between the router of a layer and its result, for faults of experts that several ranks share.

Both engines hand a layer's ids and weights to one of three exchanges (all-gather, all-to-all, the kernels that dispatch
and combine), each of which gives rows to the experts, and adds up what they made of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adapters.probe.patch import PatchContext

_EXCHANGES = ("fused_moe_naive", "fused_moe_mc2", "fused_moe_all2all")
_COUNTS = 1


def _same(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Change:
    """What becomes of a layer's tensors on one rank; each gets a tensor and gives one of the same shape.

    Attributes:
        ids, weights: ``[rows, top_k]``, as the exchange gets them, in this order; what the router gave stays as it is.
        mask: bool ``[rows]``: which rows of the kernels' exchange are no pads.
        given, made: ``[received rows, hidden]``: what the experts of this rank get, and what they make of it.
        result: ``[rows, hidden]``: the sum that this rank gets for its rows.
    """

    ids: Callable[[Tensor], Tensor] = _same
    weights: Callable[[Tensor], Tensor] = _same
    mask: Callable[[Tensor], Tensor] = _same
    given: Callable[[Tensor], Tensor] = _same
    made: Callable[[Tensor], Tensor] = _same
    result: Callable[[Tensor], Tensor] = _same


class Layer:
    """A layer of experts; true while it runs on this rank, once it is marked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def experts(self, ctx: PatchContext) -> Any:
        """Its module."""
        return ctx.model.model.layers[self.number].mlp.experts

    def mark(self, ctx: PatchContext) -> None:
        """Called in ``after_load``."""
        experts = self.experts(ctx)
        owner, name = (experts.impl, "forward") if ctx.engine == "lmdeploy" else (experts.quant_method, "apply")
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        ctx.replace(owner, name, run)


def exchanged(ctx: PatchContext, number: int, change: Change) -> None:
    """Called in ``after_load`` on the ranks that are to be wrong: change what a layer's exchange gets and gives."""
    layer = Layer(number)
    layer.mark(ctx)
    (_of_lmdeploy if ctx.engine == "lmdeploy" else _of_vllm)(ctx, layer, change)


def operator_result(ctx: PatchContext, layer: Layer, name: str, change: Callable[[Any], Any]) -> None:
    """Called in ``apply``: change what an operator of ``torch_npu`` gives back while the layer runs.

    So early that the operator itself is wrong for everybody who looks at it; ``after_load`` has to mark the layer.
    """
    import torch_npu

    for module in (torch.ops.npu, torch_npu):
        original = getattr(module, name)

        def run(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            return change(result) if layer else result

        if hasattr(original, "default"):  # torch looks it up there, by name
            run.default = original.default  # type: ignore[attr-defined]
        ctx.replace(module, name, run)


def stacks(ctx: PatchContext, number: int) -> tuple[Tensor, Tensor]:
    """The weights of a layer's experts on this rank: gate and up ``[experts, hidden, 2 * width]``, and down."""
    experts = Layer(number).experts(ctx)
    if ctx.engine == "lmdeploy":
        return experts.gate_up.weight.data, experts.down.weight.data
    return experts.w13_weight.data, experts.w2_weight.data


def _of_lmdeploy(ctx: PatchContext, layer: Layer, change: Change) -> None:
    import dlinfer.vendor.ascend.moe as module

    for name in _EXCHANGES:
        original = getattr(module, name)
        signature = inspect.signature(original)

        def run(
            *args: Any,
            original: Callable[..., Any] = original,
            signature: inspect.Signature = signature,
            **kwargs: Any,
        ) -> Any:
            if not layer:
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            weights = given["topk_weights"]
            if given["renormalize"]:  # as the engine does it, in place: so it is what the router gave in the end
                weights.div_(weights.sum(dim=-1, keepdim=True))
            given |= {
                "renormalize": False,
                "topk_ids": change.ids(given["topk_ids"]).contiguous(),
                "topk_weights": change.weights(weights),
            }
            if given.get("x_active_mask") is not None:
                given["x_active_mask"] = change.mask(given["x_active_mask"])
            return change.result(original(**given))

        ctx.replace(module, name, run)
    ctx.replace(module, "apply_mlp", _computed(module.apply_mlp, layer, change))


def _of_vllm(ctx: PatchContext, layer: Layer, change: Change) -> None:
    import vllm_ascend.ops.fused_moe.moe_mlp as module
    from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

    original = MoECommMethod.fused_experts

    def fused_experts(self: Any, fused_experts_input: Any) -> Any:
        if not layer:
            return original(self, fused_experts_input)
        routing = fused_experts_input.routing
        if routing.mc2_mask is not None:
            routing = replace(routing, mc2_mask=change.mask(routing.mc2_mask))
        made = original(
            self,
            replace(
                fused_experts_input,
                topk_ids=change.ids(fused_experts_input.topk_ids).contiguous(),
                topk_weights=change.weights(fused_experts_input.topk_weights),
                routing=routing,
            ),
        )
        made.routed_out = change.result(made.routed_out)
        return made

    ctx.replace(MoECommMethod, "fused_experts", fused_experts)
    ctx.replace(module, "unquant_apply_mlp", _computed(module.unquant_apply_mlp, layer, change))


def _computed(original: Callable[..., Any], layer: Layer, change: Change) -> Callable[..., Any]:
    """The function that computes the experts; behind the rows that were received stand others that mean nothing."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not layer:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        groups = given["group_list"]
        count = int(groups.sum() if given["group_list_type"] == _COUNTS else groups[-1])
        given["hidden_states"] = _front(given["hidden_states"], count, change.given)
        made = original(**given)
        if isinstance(made, tuple):  # vllm-ascend says when the second product began
            return _front(made[0], count, change.made), *made[1:]
        return _front(made, count, change.made)

    return compute


def _front(rows: Tensor, count: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(rows[:count]), rows[count:]])
