"""The smallest tensor-parallel size at which a model fits on a device, from the headers of the checkpoint's files.

A rank holds its share of what tensor parallelism splits, and the whole of everything else. Beside the weights there are
the case's KV cache and a margin for activations, workspaces and buffers of collectives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from align.case.capacity import capacity
from align.case.schema import Case
from align.checkpoints.parameters import splits
from align.layout import Layout
from align.models.info import ModelInfo, check_weights

#: Share of the device that weights and cache may take. lmdeploy gives 0.8 of what is free to the cache by default
#: (``cache_max_entry_count``), vllm 0.9 of the device to weights and cache (``gpu_memory_utilization``).
USABLE = 0.8
#: Bytes of an element that engines keep in the case's dtype: bfloat16 and float16.
_HALF = 2
#: Bytes of an element that keeps its own dtype, by the name that safetensors has for it.
_OWN = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8}
#: Experts, which the table of dense models does not have: each is split like a dense layer, or given to one rank.
_EXPERTS = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, as its file's header says."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """What a model takes on one device.

    Attributes:
        min_tp: smallest TP that fits; ``None`` if none of those tried does.
        needs: TP → bytes of one rank: weights and cache.
        memory: bytes of the device.
    """

    min_tp: int | None
    needs: Mapping[int, int]
    memory: int


def tensors_of(model: Path) -> Iterator[Tensor]:
    """Every tensor of a checkpoint's safetensors files; no weights are read.

    Raises:
        UserError: files are missing, cut or broken.
    """
    for file in check_weights(model):
        with file.open("rb") as stream:
            header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                yield Tensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    """``(tensor's name, kind of checkpoint, what is split)`` of the table of weights."""
    return tuple(
        (re.compile(re.escape(tensor).replace(r"\{i\}", r"\d+") + "$"), kind, divided)
        for kind, tensor, divided in splits()
    )


def share_of(name: str, tp: int, kv_heads: int) -> int:
    """Into how many parts tensor parallelism splits a tensor; 1 for one that every rank holds whole.

    Keys and values are split by their heads, and repeated where there are more ranks than those.
    """
    if _EXPERTS.search(name):
        return tp
    for pattern, kind, divided in _patterns():
        if pattern.match(name):
            if not divided:
                return 1
            return min(tp, kv_heads) if kind in ("attn.k", "attn.v") else tp
    return 1


def weight_bytes(tensors: list[Tensor], tp: int, kv_heads: int) -> int:
    """Bytes of the weights of one rank, of the fullest one."""
    total = 0
    for one in tensors:
        elements = -(-prod(one.shape) // share_of(one.name, tp, kv_heads))
        total += elements * _OWN.get(one.dtype, _HALF)
    return total


def cache_bytes(case: Case, info: ModelInfo, tp: int) -> int:
    """Bytes of the KV cache of one rank: keys and values of all layers, in the case's dtype."""
    slots = capacity(case).num_blocks * case.batch.block_size
    heads = max(1, info.kv_heads // tp)
    return 2 * info.layers * slots * heads * info.head_dim * _HALF


def smallest_fit(case: Case, info: ModelInfo, memory: int) -> Fit:
    """The smallest TP that fits, of those up to the case's own that the model can take.

    Args:
        memory: bytes of one device.

    Raises:
        UserError: the checkpoint's files cannot be read.
    """
    tensors = list(tensors_of(info.path))
    needs: dict[int, int] = {}
    for tp in range(1, case.layout.tp + 1):
        try:
            Layout(tp).check_model(info.config)
        except ValueError:
            continue
        needs[tp] = weight_bytes(tensors, tp, info.kv_heads) + cache_bytes(case, info, tp)
        if needs[tp] <= USABLE * memory:
            return Fit(tp, needs, memory)
    return Fit(None, needs, memory)
