"""What an engine gives its model in a step, for faults of inputs: the model itself is told something wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from adapters.probe.patch import PatchContext

#: Engine → names of token ids and of positions among the model's inputs.
_NAMES = {"lmdeploy": ("input_ids", "position_ids"), "vllm": ("input_ids", "positions")}


def given(
    ctx: PatchContext,
    ids: Callable[[Tensor], Tensor] | None = None,
    positions: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Called in ``after_load``: other token ids, or other positions, in the steps of requests."""
    changes = [(name, change) for name, change in zip(_NAMES[ctx.engine], (ids, positions), strict=True) if change]

    def changed(inputs: dict[str, Any]) -> dict[str, Any]:
        told = {name: change(inputs[name]) for name, change in changes if isinstance(inputs.get(name), Tensor)}
        return {**inputs, **told} if ctx.step >= 0 else inputs

    if ctx.engine == "lmdeploy":
        prepare = ctx.model.prepare_inputs_for_generation

        @functools.wraps(prepare)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            return changed(prepare(*args, **kwargs))

        ctx.replace(ctx.model, "prepare_inputs_for_generation", prepared)
        return
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    original = NPUModelRunner._model_forward

    @functools.wraps(original)
    def forward(self: Any, tokens: int, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        inputs = changed({"input_ids": input_ids, "positions": positions})
        return original(self, tokens, inputs["input_ids"], inputs["positions"], *args, **kwargs)

    ctx.replace(NPUModelRunner, "_model_forward", forward)
