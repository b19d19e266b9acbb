"""The calls of attention operators, for faults that change their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from adapters.drill.places import operator
from adapters.probe.patch import PatchContext

#: lmdeploy's operators, and vLLM's.
PREFILL, DECODE = "_npu_flash_attention", "_npu_paged_attention"
FUSED = "npu_fused_infer_attention_score"


def each_call(ctx: PatchContext, layer: int, change: Callable[[str, dict[str, Any]], None]) -> None:
    """Called in ``after_load``: change(operator, arguments) before each call, from a layer on, in real steps.

    ``arguments`` are those passed by name, which change alters in place.
    """
    running = {"layer": -1}
    for at in range(len(ctx.model.model.layers)):
        _mark(ctx, operator(ctx, at, "attention"), running, at)
    if ctx.engine == "vllm":
        import torch_npu

        _wrap(ctx, torch_npu, FUSED, running, layer, change)
        return
    for name in (PREFILL, DECODE):
        _wrap(ctx, torch.ops.atb, name, running, layer, change)


def _mark(ctx: PatchContext, attention: Any, running: dict[str, int], layer: int) -> None:
    original = attention.forward

    @functools.wraps(original)  # whoever listens looks for its arguments by name
    def forward(*args: Any, **kwargs: Any) -> Any:
        running["layer"] = layer
        return original(*args, **kwargs)

    ctx.replace(attention, "forward", forward)


def _wrap(
    ctx: PatchContext,
    owner: Any,
    name: str,
    running: dict[str, int],
    first: int,
    change: Callable[[str, dict[str, Any]], None],
) -> None:
    original = getattr(owner, name)

    def wrong(*args: Any, **given: Any) -> Any:
        if ctx.step >= 0 and running["layer"] >= first:
            change(name, given)
        return original(*args, **given)

    if hasattr(original, "default"):
        wrong.default = original.default  # type: ignore[attr-defined]  # torch looks it up there, by name
    ctx.replace(owner, name, wrong)
