"""Which tensor of a Hugging Face checkpoint belongs to which operator, and where engines keep it.

The table ``weights.tsv`` is the only home of these names. Engines fuse projections along their rows: a *part* of a live
parameter is one tensor of the checkpoint, or a rank's share of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from align.checkpoints.shards import Shard, split
from align.checkpoints.table import Structure, kinds

_QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
_GATE_UP = (("gate", "intermediate"), ("up", "intermediate"))
#: Part → the parts of its fused parameter, in their order, with the axis that gives each one's rows.
FUSED = {part: parts for parts in (_QKV, _GATE_UP) for part, _ in parts}


@dataclass(frozen=True)
class Parameter:
    """One tensor of the checkpoint.

    Attributes:
        kind: the checkpoint (semantic point) that its operator produces.
        layer: ``None`` for what exists once.
        tensor: its name in the checkpoint's files.
        live: the engines' parameter that holds it.
        part: which part of a fused parameter, ``""`` for the whole.
        split: what tensor parallelism divides: ``rows``, ``columns``, ``vocab`` or ``""``.
    """

    kind: str
    layer: int | None
    tensor: str
    live: str
    part: str
    split: str

    @property
    def bias(self) -> bool:
        return self.tensor.endswith(".bias")


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[str, ...], ...]:
    lines = Path(__file__).with_name("weights.tsv").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(line.split("\t")) for line in lines[1:])


def parameters(structure: Structure) -> Iterator[Parameter]:
    """Every tensor that the table knows of a model, biases included whether or not the model has them."""
    for kind, tensor, live, part, divided in _rows():
        if not structure.has(kinds()[kind]):
            continue
        for layer in range(structure.layers) if kinds()[kind].per_layer else (None,):
            yield Parameter(
                kind, layer, tensor.replace("{i}", str(layer)), live.replace("{i}", str(layer)), part, divided
            )


def rows_of(parameter: Parameter, structure: Structure, tp_rank: int) -> tuple[int, Shard | None]:
    """Where a part starts in the live parameter of a rank, and which rows of the checkpoint's tensor it is.

    Returns:
        ``(first row in the live parameter, share of the tensor's rows)``; the share is ``None`` for a whole tensor.
    """
    if not parameter.part:
        return 0, None
    first = 0
    for name, axis in FUSED[parameter.part]:
        width = structure.head_dim if axis != "intermediate" else 1
        shard = split(structure.size(axis), structure.tp, tp_rank)
        if name == parameter.part:
            return first, Shard(shard.start * width, shard.count * width, shard.total * width)
        first += shard.count * width
    raise AssertionError(parameter)
