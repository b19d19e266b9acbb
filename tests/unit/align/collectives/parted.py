"""Two ranks whose next calls do not belong together."""

from __future__ import annotations

from typing import Any

from align.collectives.record.mismatch import Mismatch
from align.collectives.record.types import CollectiveCall, Place


def call(rank: int, where: str, number: int = 12, **changed: Any) -> CollectiveCall:
    given: dict[str, Any] = {
        "rank": rank, "at": number + 3, "in_group": number, "group": (0, 1), "group_name": "3", "backend": "hccl",
        "operation": "all_reduce", "function": "torch.distributed.all_reduce", "dtype": "bfloat16",
        "given": ((4, 64),), "got": ((4, 64),), "place": Place(1, 3, inside=(where,) if where else (), after="embed"),
        "reduce": "sum", "site": (f"engine/linear.py:{30 + rank} forward", "engine/model.py:9 layer"), "ended": False,
    }  # fmt: skip
    return CollectiveCall(**{**given, **changed})


#: Rank 1 leaves out the call of ``attn.o`` and goes on to that of ``mlp.down``; rank 1 sees it.
SKIPPED = Mismatch(
    rank=1,
    peer=0,
    differ=("checkpoint",),
    mine=call(1, "layers.1.mlp.down"),
    theirs=call(0, "layers.1.attn.o"),
    before=call(1, "layers.0.mlp.down", 11),
)
#: Rank 1 has ended its forward; rank 0 sees it.
SHORT = Mismatch(rank=0, peer=1, differ=("count",), mine=call(0, "layers.1.mlp.down"), theirs=None, ended=Place(1, 3))
