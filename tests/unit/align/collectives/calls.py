"""Made-up records of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from align.collectives.record.types import CollectiveCall, Place

Tensor = torch.Tensor
SITE = "engine/linear.py:12 forward"


def call(
    rank: int,
    operation: str,
    ins: Sequence[Tensor] = (),
    outs: Sequence[Tensor] = (),
    at: int = 0,
    where: str = "",
    **more: Any,
) -> CollectiveCall:
    """One call of one rank of group 0, 1 with its values."""
    first = next((one for one in (*ins, *outs)), torch.zeros(1))
    about: dict[str, Any] = {
        "group": (0, 1),
        "group_name": "tp",
        "backend": "gloo",
        "function": f"torch.distributed.{operation}",
        "dtype": str(first.dtype).removeprefix("torch."),
        "given": tuple(tuple(one.shape) for one in ins),
        "got": tuple(tuple(one.shape) for one in outs),
        "place": Place(1, 0, inside=(where,) if where else ()),
        "reduce": "sum" if "reduce" in operation else "",
        "site": (SITE,),
        "values": True,
        "tensors": {
            **{f"in.{index}": one for index, one in enumerate(ins)},
            **{f"out.{index}": one for index, one in enumerate(outs)},
        },
    }
    return CollectiveCall(rank=rank, at=at, in_group=at, operation=operation, **{**about, **more})
