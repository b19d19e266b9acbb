"""Which tensor of a Hugging Face checkpoint belongs to which operator, and where engines keep it.

The table ``weights.tsv`` is the only home of these names. Engines fuse projections along their rows: a *part* of a live
parameter is one tensor of the checkpoint, or a rank's share of it. They stack the experts of a layer: ``NAME[3].T`` is
the transpose of the fourth matrix of ``NAME``. ``|`` stands between the names that engines have for the same thing.
``when`` is a tag of the models that a row is for, or ``!`` and a tag of those that it is not for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from align.checkpoints.shards import Shard, split
from align.checkpoints.table import Structure, kinds

_QKV = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
_GATE_UP = (("gate", "intermediate"), ("up", "intermediate"))
_SHARED = (("shared.gate", "shared"), ("shared.up", "shared"))
#: Part → the parts of its fused parameter, in their order, with the axis that gives each one's rows.
FUSED = {part: parts for parts in (_QKV, _GATE_UP, _SHARED) for part, _ in parts}


@dataclass(frozen=True)
class Parameter:
    """One tensor of the checkpoint.

    Attributes:
        kind: the checkpoint (semantic point) that its operator produces.
        layer: ``None`` for what exists once.
        tensor: its name in the checkpoint's files.
        live: the engines' parameter that holds it, see above.
        part: which part of a fused parameter, ``""`` for the whole.
        split: what tensor parallelism divides: ``rows``, ``columns``, ``vocab`` or ``""``.
        expert: of which expert it is; ``None`` for what is not of one.
    """

    kind: str
    layer: int | None
    tensor: str
    live: str
    part: str
    split: str
    expert: int | None = None

    @property
    def bias(self) -> bool:
        return self.tensor.endswith(".bias")

    @property
    def sole(self) -> bool:
        """Whether it is the one weight (or bias) of its operator."""
        return self.kind not in ("moe.routed", "moe.shared")

    @property
    def places(self) -> tuple[LivePlace, ...]:
        """Where engines may hold it."""
        return tuple(map(_place, self.live.split("|")))


@dataclass(frozen=True)
class LivePlace:
    """A parameter of an engine, or the matrix ``index`` of one that stacks several; ``transposed`` matrices too."""

    name: str
    index: int | None
    transposed: bool


_PLACE = re.compile(r"(?P<name>[^\[]+)(\[(?P<index>\d+)\])?(?P<transposed>\.T)?")


def _place(text: str) -> LivePlace:
    found = _PLACE.fullmatch(text)
    assert found is not None, text
    index = found["index"]
    return LivePlace(found["name"], None if index is None else int(index), bool(found["transposed"]))


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[str, ...], ...]:
    lines = Path(__file__).with_name("weights.tsv").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(line.split("\t")) for line in lines[1:])


def splits() -> tuple[tuple[str, str, str], ...]:
    """``(kind, name of the tensor with {i} for the layer, what tensor parallelism splits)`` of the whole table."""
    return tuple((kind, tensor, divided) for kind, tensor, _, _, divided, _ in _rows())


def parameters(structure: Structure) -> Iterator[Parameter]:
    """Every tensor that the table knows of a model, biases included whether or not the model has them."""
    for kind, tensor, live, part, divided, when in _rows():
        if not structure.has(kinds()[kind]) or not structure.tagged(when):
            continue
        for layer in range(structure.layers) if kinds()[kind].per_layer else (None,):
            for expert in range(structure.experts if "{e}" in tensor else 1):
                names = [one.replace("{i}", str(layer)).replace("{e}", str(expert)) for one in (tensor, live)]
                of = expert if "{e}" in tensor else None
                yield Parameter(kind, layer, names[0], names[1], part, divided, of)


def ranks_sharing(parameter: Parameter, structure: Structure) -> int:
    """Among how many ranks a parameter is divided: experts have a division of their own."""
    return structure.tp if parameter.expert is None else structure.expert_tp


def rows_of(parameter: Parameter, structure: Structure, tp_rank: int) -> tuple[int, Shard | None]:
    """Where a part starts in the live parameter of a rank, and which rows of the checkpoint's tensor it is.

    Args:
        tp_rank: the rank's place among those of :func:`ranks_sharing`.

    Returns:
        ``(first row in the live parameter, share of the tensor's rows)``; the share is ``None`` for a whole tensor.
    """
    if not parameter.part:
        return 0, None
    first = 0
    for name, axis in FUSED[parameter.part]:
        width = structure.head_dim if axis in ("heads", "kv_heads") else 1
        shard = split(structure.size(axis), ranks_sharing(parameter, structure), tp_rank)
        if name == parameter.part:
            return first, Shard(shard.start * width, shard.count * width, shard.total * width)
        first += shard.count * width
    raise AssertionError(parameter)
