"""Pure functions between an engine's own tensors and the canonical form, with their inverses.

A transform takes one native tensor to one canonical one. Its inverse needs every part of a fused native tensor, so it
takes the canonical parts in the order of the fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from align.checkpoints.shards import split
from align.checkpoints.table import Structure


@dataclass(frozen=True)
class Dims:
    """Sizes of one rank's tensors: heads and intermediate channels are the rank's own."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    topk: int = 0

    @classmethod
    def of(cls, structure: Structure, tp_rank: int) -> Dims:
        tp = structure.tp
        return cls(
            heads=split(structure.heads, tp, tp_rank).count,
            kv_heads=split(structure.kv_heads, tp, tp_rank).count,
            head_dim=structure.head_dim,
            intermediate=split(structure.intermediate, tp, tp_rank).count,
            experts=structure.experts,
            topk=structure.topk,
        )


Forward = Callable[..., Tensor]
#: Canonical parts ``[T, …]`` in the order of the fusion → the native tensor.
Inverse = Callable[[Sequence[Tensor], Dims], Tensor]


@dataclass(frozen=True)
class Transform:
    """A named pair; ``inverse`` is ``None`` when the native tensor cannot be rebuilt, and ``undo`` says it in words.

    ``forward`` takes what the tap picks, one tensor or several, and the sizes.
    """

    forward: Forward
    inverse: Inverse | None
    undo: str


def _rows(tensor: Tensor, dims: Dims) -> Tensor:
    """``[1, T, C]`` or ``[T, C]`` → ``[T, C]``."""
    return tensor.reshape(-1, tensor.shape[-1])


def _flat(tensor: Tensor, dims: Dims) -> Tensor:
    return tensor.reshape(-1)


def _heads(tensor: Tensor, dims: Dims) -> Tensor:
    """``[T, heads * head_dim]``, ``[1, T, heads, head_dim]`` or ``[T, heads, head_dim]`` → ``[T, heads, head_dim]``."""
    return tensor.reshape(-1, _count(tensor, dims), dims.head_dim)


def _count(tensor: Tensor, dims: Dims) -> int:
    if tensor.dim() >= 3 and tensor.shape[-1] == dims.head_dim:
        return tensor.shape[-2]
    return tensor.shape[-1] // dims.head_dim


def _qkv(part: int) -> Forward:
    """``[…, (heads + 2 kv_heads) * head_dim]`` → one of q, k, v as ``[T, its heads, head_dim]``."""

    def forward(tensor: Tensor, dims: Dims) -> Tensor:
        sizes = [dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim]
        rows = tensor.reshape(-1, tensor.shape[-1])
        found: Tensor = rows.split(sizes, dim=-1)[part].unflatten(-1, (-1, dims.head_dim))
        return found

    return forward


def _half(part: int) -> Forward:
    """``[…, 2 * intermediate]`` → its first or second half ``[T, intermediate]``."""

    def forward(tensor: Tensor, dims: Dims) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        found: Tensor = rows.split([dims.intermediate] * 2, dim=-1)[part]
        return found

    return forward


def _ids(tensor: Tensor, dims: Dims) -> Tensor:
    """Experts ``[T, top_k]`` in any order → in rising order, int64; −1 for those that a router chose too few."""
    ids = tensor.reshape(-1, tensor.shape[-1]).to(torch.int64).sort(-1).values
    return torch.nn.functional.pad(ids, (max(0, dims.topk - ids.shape[-1]), 0), value=-1)


def _by_expert(ids: Tensor, weights: Tensor, dims: Dims) -> Tensor:
    """Experts and their weights ``[T, top_k]`` → the weight of every expert ``[T, experts]``, 0 for the others.

    Raises:
        RuntimeError: an expert that does not exist.
    """
    rows = weights.reshape(-1, weights.shape[-1])
    where = ids.reshape(-1, ids.shape[-1]).to(torch.int64)
    return torch.zeros(len(rows), dims.experts, dtype=rows.dtype, device=rows.device).scatter_(1, where, rows)


def _same(parts: Sequence[Tensor], dims: Dims) -> Tensor:
    return parts[0]


def _batched(parts: Sequence[Tensor], dims: Dims) -> Tensor:
    return parts[0].unsqueeze(0)


def _flatten(parts: Sequence[Tensor], dims: Dims) -> Tensor:
    return parts[0].flatten(1)


def _fuse(parts: Sequence[Tensor], dims: Dims) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


def _fuse_batched(parts: Sequence[Tensor], dims: Dims) -> Tensor:
    return _fuse(parts, dims).unsqueeze(0)


#: Names used in the engines' tap tables. ``1`` in a name: the native tensor has a leading batch axis of one.
TRANSFORMS: dict[str, Transform] = {
    "rows": Transform(_rows, _same, "as it is"),
    "rows1": Transform(_rows, _batched, "unsqueeze(0)"),
    "heads": Transform(_heads, _same, "as it is"),
    "heads_flat": Transform(_heads, _flatten, "flatten(1)"),
    "qkv.q": Transform(_qkv(0), _fuse, "cat(q, k, v)"),
    "qkv.k": Transform(_qkv(1), _fuse, "cat(q, k, v)"),
    "qkv.v": Transform(_qkv(2), _fuse, "cat(q, k, v)"),
    "qkv1.q": Transform(_qkv(0), _fuse_batched, "cat(q, k, v).unsqueeze(0)"),
    "qkv1.k": Transform(_qkv(1), _fuse_batched, "cat(q, k, v).unsqueeze(0)"),
    "qkv1.v": Transform(_qkv(2), _fuse_batched, "cat(q, k, v).unsqueeze(0)"),
    "gate_up.gate": Transform(_half(0), _fuse, "cat(gate, up)"),
    "gate_up.up": Transform(_half(1), _fuse, "cat(gate, up)"),
    "gate_up1.gate": Transform(_half(0), _fuse_batched, "cat(gate, up).unsqueeze(0)"),
    "gate_up1.up": Transform(_half(1), _fuse_batched, "cat(gate, up).unsqueeze(0)"),
    "ids": Transform(_ids, None, "none: the order of the choices is lost"),
    "by_expert": Transform(_by_expert, None, "none: the order of the choices is lost"),
    "flat": Transform(_flat, _same, "as it is"),
    "flat1": Transform(_flat, _batched, "unsqueeze(0)"),
    "slots": Transform(_flat, None, "none: positions are read through the block table"),
    "table": Transform(lambda tensor, dims: tensor, None, "none"),
}
