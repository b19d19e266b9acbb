"""What a rank's part of a layer becomes, for faults of communication. They act with several ranks alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from adapters.drill.places import operator
from adapters.probe.patch import PatchContext

#: ``function(partial, reduce)`` makes a layer's result of this rank's summand; ``reduce(tensor)`` is the sum over the
#: ranks, in a tensor of its own.
Change = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def reduced(ctx: PatchContext, changes: Mapping[tuple[int, str], Change]) -> None:
    """Called in ``after_load``: other results of projections whose parts are summed.

    Args:
        changes: (layer, ``o`` or ``down``) → what to make of the part.
    """
    if ctx.layout[0] == 1:
        return
    wrap = _of_lmdeploy if ctx.engine == "lmdeploy" else _of_vllm
    for (layer, part), change in changes.items():
        wrap(ctx, operator(ctx, layer, part), change)


def _of_lmdeploy(ctx: PatchContext, linear: Any, change: Change) -> None:
    import torch.distributed as dist

    original = linear.forward

    @functools.wraps(original)
    def forward(x: Any, weight: Any, bias: Any = None, all_reduce: bool = False, group: Any = None,
                *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        if not all_reduce:
            return original(x, weight, bias, all_reduce, group, *args, **kwargs)

        def reduce(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            return total

        return change(original(x, weight, bias, False, group), reduce)

    ctx.replace(linear, "forward", forward)


def _of_vllm(ctx: PatchContext, linear: Any, change: Change) -> None:
    from vllm.distributed import tensor_model_parallel_all_reduce

    original = linear.forward

    @functools.wraps(original)
    def forward(input_: Any, **kwargs: Any) -> Any:
        reduces, linear.reduce_results = linear.reduce_results, False
        try:
            partial, bias = original(input_, **kwargs)
        finally:
            linear.reduce_results = reduces
        return change(partial, tensor_model_parallel_all_reduce), bias

    ctx.replace(linear, "forward", forward)
