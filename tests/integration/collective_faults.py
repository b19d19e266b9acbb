"""Faults of collectives as patch files: one rank makes a call less, or one more, in one step of the first run."""

from __future__ import annotations

from pathlib import Path

#: Layer and step at which the fault is.
LAYER, STEP = 1, 3

_COMMON = f"""
import inspect

import torch.distributed as dist

from adapters.probe.steplog import process_log


def due():
    log = process_log()
    return log is not None and log.generation == 1 and log.in_step and log.place.step == {STEP}


def apply(ctx):
    pass


def output(ctx):
    return ctx.model.model.layers[{LAYER}].self_attn.o_proj
"""

#: Rank 1 does not reduce what its part of o_proj gives.
_SKIP = (
    _COMMON
    + """

def after_load(ctx):
    if ctx.tp_rank != 1:
        return
    layer = output(ctx)
    target = layer.impl if ctx.engine == "lmdeploy" else layer
    original = target.forward
    signature = inspect.signature(original)

    def forward(*args, **kwargs):
        if not due():
            return original(*args, **kwargs)
        if ctx.engine == "lmdeploy":
            bound = signature.bind(*args, **kwargs)
            bound.arguments["all_reduce"] = False
            return original(*bound.args, **bound.kwargs)
        layer.reduce_results = False
        try:
            return original(*args, **kwargs)
        finally:
            layer.reduce_results = True

    ctx.replace(target, "forward", forward)
"""
)

#: Rank 0 reduces the same once more.
_MORE = (
    _COMMON
    + """

def after_load(ctx):
    if ctx.tp_rank != 0:
        return
    layer = output(ctx)
    target = layer.impl if ctx.engine == "lmdeploy" else layer
    original = target.forward

    def forward(*args, **kwargs):
        result = original(*args, **kwargs)
        if due():
            if ctx.engine == "lmdeploy":
                from lmdeploy.pytorch.distributed import get_tp_group

                dist.all_reduce(result, group=get_tp_group())
            else:
                from vllm.distributed import tensor_model_parallel_all_reduce

                tensor_model_parallel_all_reduce(result[0] if isinstance(result, tuple) else result)
        return result

    ctx.replace(target, "forward", forward)
"""
)

_TEXTS = {"skip": _SKIP, "more": _MORE}


def patch(fault: str, directory: Path) -> Path:
    """The file of a fault, ``skip`` or ``more``, written into a directory."""
    file = directory / f"{fault}.py"
    file.write_text(_TEXTS[fault])
    return file
