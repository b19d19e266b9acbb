"""What the operator residual keeps between steps: weights in float32, and each request's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
#: Keys that a history has room for at first; doubled when they do not suffice.
FIRST_CAPACITY = 256


class Weights(Protocol):
    """Canonical local weights of this rank; the live parameters, or views of them."""

    @property
    def norm_offset(self) -> float:
        """What the engine adds to a norm's live weight before it multiplies."""
        ...

    def weight(self, kind: str, layer: int | None) -> Tensor | None:
        """``attn.q`` → ``[out_local, in_local]``; norms ``[n]``; ``embed`` and ``logits`` ``[vocab_local, hidden]``.

        ``None`` if this rank has none. The weight of ``attn.o_partial`` is that of ``attn.o``, and is asked for so.
        """
        ...

    def bias(self, kind: str, layer: int | None) -> Tensor | None:
        """``[out_local]``, or ``None`` if the operator adds none (under ``attn.o_partial``: on this rank)."""
        ...


@dataclass(frozen=True)
class Matrix:
    """Weights of linear operators with a common input, below each other.

    Attributes:
        matrix: float32 ``[out, in]``.
        norms: float32 ``[out]``, 2-norms of its rows.
        sizes: rows of each operator.
        biases: float32 ``[out]`` of each operator, or ``None``.
    """

    matrix: Tensor
    norms: Tensor
    sizes: tuple[int, ...]
    biases: tuple[Tensor | None, ...]


def _signature(tensor: Tensor | None) -> Any:
    """Changes when a parameter is replaced or written to; ``None`` in it if writes cannot be seen."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, version)


def _wide(tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU: a view of the parameter would be changed with it."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)


class FloatWeights:
    """Float32 copies of live weights, kept while they fit and as long as the parameters do not change."""

    def __init__(self, weights: Weights, cache_bytes: int) -> None:
        self._weights, self._room = weights, cache_bytes
        self._kept: dict[Any, tuple[Any, int, Any]] = {}

    def begin(self) -> None:
        """Forget copies of tensors whose changes cannot be seen (tensors of inference mode have no version)."""
        for key, (signatures, size, _) in list(self._kept.items()):
            if any(one is not None and one[-1] is None for one in signatures):
                self._room += size
                del self._kept[key]

    def matrix(self, kinds: Sequence[str], layer: int | None, limit: int | None = None) -> Matrix | None:
        """The weights of ``kinds``, fused; ``None`` if one is missing. ``limit``: rows that count (padding after)."""
        weights = [self._weights.weight(kind.removesuffix("_partial"), layer) for kind in kinds]
        found = [weight[:limit] for weight in weights if weight is not None]
        if len(found) < len(weights):
            return None
        biases = [self._weights.bias(kind, layer) for kind in kinds]

        def make() -> tuple[Matrix, int]:
            matrix = _wide(found[0]) if len(found) == 1 else torch.cat([_wide(weight) for weight in found])
            norms = torch.linalg.vector_norm(matrix, dim=1)
            wide = tuple(None if bias is None else _wide(bias[:limit]) for bias in biases)
            return Matrix(matrix, norms, tuple(weight.shape[0] for weight in found), wide), matrix.nbytes

        result = self._cached((tuple(kinds), layer), [*found, *biases], make)
        assert isinstance(result, Matrix)
        return result

    def vectors(self, kind: str, layers: Sequence[int | None]) -> Tensor | None:
        """What the norms of ``layers`` multiply with, float32 ``[L, n]``; ``None`` if one is missing."""
        found = [weight for layer in layers if (weight := self._weights.weight(kind, layer)) is not None]
        if len(found) < len(layers):
            return None

        def make() -> tuple[Tensor, int]:
            stacked = torch.stack([_wide(weight) for weight in found]) + self._weights.norm_offset
            return stacked, stacked.nbytes

        result = self._cached((kind, tuple(layers)), found, make)
        assert isinstance(result, Tensor)
        return result

    def raw(self, kind: str) -> Tensor | None:
        """The parameter itself, for operators that copy."""
        found = self._weights.weight(kind, None)
        return None if found is None else found.detach()

    def _cached(self, key: Any, sources: Sequence[Tensor | None], make: Callable[[], tuple[Any, int]]) -> Any:
        signatures = [_signature(source) for source in sources]
        kept = self._kept.pop(key, None)
        if kept is not None and kept[0] == signatures:
            self._kept[key] = kept
            return kept[2]
        if kept is not None:
            self._room += kept[1]
        value, size = make()
        if size <= self._room:
            self._room -= size
            self._kept[key] = (signatures, size, value)
        return value


class History:
    """The keys and values of one request so far, of all layers, in float32 (``[L, kv_heads, capacity, head_dim]``)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._shape = (layers, kv_heads, 0, head_dim)
        self._keys = torch.empty(self._shape)
        self._values = torch.empty(self._shape)
        self._filled = torch.zeros(layers, 0, dtype=torch.bool)

    def write(self, start: int, keys: Tensor, values: Tensor, layers: Tensor) -> None:
        """Keep keys and values ``[L, n, kv_heads, head_dim]`` of positions ``start …``.

        ``layers``: bool ``[L]``, those that were recorded; the others are then unknown at these positions.
        """
        end = start + keys.shape[1]
        self._grow(end)
        self._keys[:, :, start:end] = keys.transpose(1, 2)
        self._values[:, :, start:end] = values.transpose(1, 2)
        self._filled[:, start:end] = layers[:, None]

    def _grow(self, needed: int) -> None:
        capacity = self._keys.shape[2]
        if needed <= capacity:
            return
        room = max(needed, 2 * capacity, FIRST_CAPACITY)
        layers, kv_heads, _, head_dim = self._shape
        for name in ("_keys", "_values"):
            grown = torch.zeros(layers, kv_heads, room, head_dim)
            grown[:, :, :capacity] = getattr(self, name)
            setattr(self, name, grown)
        filled = torch.zeros(layers, room, dtype=torch.bool)
        filled[:, :capacity] = self._filled
        self._filled = filled

    def known(self, first: int, end: int) -> Tensor:
        """Which layers ``[L]`` have every position from ``first`` up to ``end``."""
        if end > self._filled.shape[1]:
            return torch.zeros(self._shape[0], dtype=torch.bool)
        return self._filled[:, first:end].all(1)

    def read(self, low: int, high: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layers ``low … high - 1`` at positions below ``end``: ``[l, end, kv_heads, head_dim]``."""
        keys, values = self._keys[low:high, :, :end], self._values[low:high, :, :end]
        return keys.transpose(1, 2), values.transpose(1, 2)
