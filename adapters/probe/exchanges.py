"""Wraps the operators that send tokens to the ranks of their experts and back: they are recorded as collectives.

They compute and communicate at once and go around ``torch.distributed``. Of what they return the rows that were really
received are kept: what stands behind them means nothing. How a row finds its way home is private to the kernels and is
not kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adapters.probe.collectives import Asked, Function, process_recorder
from adapters.probe.spots import here
from adapters.probe.steplog import process_log
from align.checkpoints.table import parse

#: Operator → operation, and its tensors in the order in which they are recorded.
OPERATORS = {
    "npu_moe_distribute_dispatch_v2": ("dispatch", ("x", "expert_ids", "x_active_mask")),
    "npu_moe_distribute_combine_v2": ("combine", ("expand_x", "expert_ids", "expert_scales", "x_active_mask")),
}
_POSITIONS = {
    "npu_moe_distribute_dispatch_v2": ("x", "expert_ids", "group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num"),
    "npu_moe_distribute_combine_v2": (
        "expand_x", "expert_ids", "assist_info_for_combine", "ep_send_counts", "expert_scales", "group_ep",
        "ep_world_size", "ep_rank_id", "moe_expert_num",
    ),
}  # fmt: skip
#: Arguments that are kept as they are.
_ABOUT = ("ep_world_size", "ep_rank_id", "moe_expert_num", "expert_token_nums_type", "global_bs")
_MARK = "_align_exchange"


def wrap_exchanges() -> None:
    """Wrap what is there, behind patches: what a patch makes of an operator is what the operator did."""
    for owner in (getattr(torch.ops, "npu", None), sys.modules.get("torch_npu")):
        for name in OPERATORS:
            original = getattr(owner, name, None)
            if original is not None and not hasattr(original, _MARK):
                setattr(owner, name, _wrapped(name, original))


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    operation, tensors = OPERATORS[name]

    def exchange(*args: Any, **kwargs: Any) -> Any:
        recorder = process_recorder()
        if recorder is None:
            return original(*args, **kwargs)
        values = {**dict(zip(_POSITIONS[name], args, strict=False)), **kwargs}
        here.enter(_place(here.inside))
        try:
            begun = recorder.begin(functools.partial(_asked, name, operation, tensors, values))
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if begun is not None:
                    recorder.end(begun, error=f"{type(error).__name__}: {error}")
                raise
            if begun is not None:
                begun.asked = replace(begun.asked, got=_got(operation, result))
                recorder.end(begun)
            return result
        finally:
            here.leave()

    functools.update_wrapper(exchange, original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    setattr(exchange, _MARK, True)
    for known in ("default", "_schema", "_qualified_op_name"):  # what others look up in an operator
        if hasattr(original, known):
            setattr(exchange, known, getattr(original, known))
    return exchange


def _place(inside: tuple[str, ...]) -> tuple[str, ...]:
    """The experts' own checkpoint, whichever of their functions calls."""
    if not inside:
        return inside
    layer = parse(inside[-1]).layer
    return inside if layer is None else (f"layers.{layer}.moe.routed",)


def _asked(name: str, operation: str, tensors: tuple[str, ...], values: Mapping[str, Any]) -> Asked:
    given = [values.get(one) for one in tensors]
    if operation == "combine":
        given[0] = values["expand_x"][: _received(values["ep_send_counts"])]
    masked = values.get("x_active_mask")
    log = process_log()
    part = None if log is None else log.own_rows
    about = {
        **{one: int(values[one]) for one in _ABOUT if isinstance(values.get(one), int)},
        "masked": masked is not None,
        # The rows of this rank that are tokens; the others are pads. Of dummies nobody knows.
        **({} if part is None else {"tokens": part}),
    }
    return Asked(
        Function(name, operation, "", "", ""), tuple(one for one in given if isinstance(one, Tensor)), (),
        dist.group.WORLD, "", None, about=about,
    )  # fmt: skip


def _received(counts: Tensor) -> int:
    return int(counts.reshape(-1)[-1]) if counts.numel() else 0


def _got(operation: str, result: Any) -> tuple[Tensor, ...]:
    if operation == "combine":
        return (result,)
    rows, _, _, numbers, counts = result[:5]
    return rows[: _received(counts)], numbers, counts
