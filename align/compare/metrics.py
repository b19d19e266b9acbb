"""How far two tensors lie apart: over the whole, and at the worst token, channel and head.

A whole-tensor number averages a local fault away, and the largest relative error of single elements fires on every
right pair in bfloat16 (elements near zero), so both are reported and neither is trusted alone.

Elements are compared in float32; sums are float32 within a chunk (pairwise) and float64 over chunks. Two elements
agree where they compare equal or are both NaN; an element that is not finite on one side only is an infinite error.
Non-finite elements are counted, equal or not.

A slice (token, channel, head) with a norm near zero would have an arbitrary relative error: noise does not shrink with
the value it lands on. The denominator of a slice is therefore its own norm or :data:`SLICE_FLOOR` of the median norm
of such slices, whichever is larger.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan, prod, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from align.compare.bits import count_nonfinite, same_bits

#: Smallest denominator of a relative error (seed 003, "Comparison method").
CLAMP = 1e-8
#: Of the median slice norm: the smallest denominator of a slice.
SLICE_FLOOR = 0.5
#: Elements in one pass: few enough for the reused buffers to stay in the processor's cache.
CHUNK = 1 << 16
#: How many differing rows of an integer tensor are named.
NAMED_ROWS = 8


@dataclass(frozen=True)
class Worst:
    """The slice that is furthest off: its index and its relative L2 error."""

    index: int
    rel_l2: float


@dataclass(frozen=True)
class Metrics:
    """Distance between a candidate and a reference tensor of shape ``[N, *channels]``.

    Attributes:
        equal: every element compares equal, or is NaN on both sides (``torch.equal`` but for the NaN).
        max_abs: largest ``|candidate - reference|``; infinite if an element is finite on one side only.
        max_rel: largest ``|candidate - reference| / max(|reference|, 1e-8)``, in float32 as seed 003 has it.
        rel_l2: norm of the difference over the norm of the reference (0 / 0 is 0).
        cosine: of the two tensors as vectors; 1 for equal ones, ``nan`` if one is zero and the other is not.
        worst_token: index of the row.
        worst_channel: flat index into ``channels``.
        worst_head: index into the second axis; ``None`` unless the shape is ``[N, heads, head_dim]``.
        elements: how many were compared.
        nonfinite: elements that are NaN or infinite on at least one side.
        rows: first differing rows, for integers alone.
        rows_total: how many rows differ, for integers alone.

    For integers the distances are ``None``: ids are equal or not.
    """

    equal: bool
    max_abs: float | None
    max_rel: float | None
    rel_l2: float | None
    cosine: float | None
    worst_token: Worst | None
    worst_channel: Worst | None
    worst_head: Worst | None
    elements: int
    nonfinite: int
    rows: tuple[int, ...] = ()
    rows_total: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; numbers that are not finite become text."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def measure(candidate: torch.Tensor, reference: torch.Tensor) -> Metrics:
    """Compare two tensors ``[N, *channels]`` of one shape; floating dtypes may differ.

    Raises:
        ValueError: the shapes differ, there is no row axis, or one tensor is of integers and the other is not.
    """
    if same_bits(candidate, reference):
        return identical(candidate)
    return join([measure_block(candidate, reference)])


def identical(tensor: torch.Tensor) -> Metrics:
    """The metrics of a tensor ``[N, *channels]`` and a copy of it."""
    elements = tensor.numel()
    if not tensor.is_floating_point():
        return Metrics(True, None, None, None, None, None, None, None, elements, 0)
    none = Worst(0, 0.0) if elements else None
    head = none if tensor.dim() == 3 else None
    return Metrics(True, 0.0, 0.0, 0.0, 1.0, none, none, head, elements, count_nonfinite(tensor))


@dataclass(frozen=True)
class Block:
    """Sums over some rows of a pair of tensors, from which :func:`join` makes metrics of any union of blocks.

    Attributes:
        shape: ``[N, *channels]``.
        indices: of its rows in the whole, ``[N]``; ``None`` counts from 0.
        token_err, token_ref: float64 ``[N]``: sums of squares of the difference and of the reference.
        channel_err, channel_ref: float64 ``[C]``, likewise over rows; ``C`` is the product of the channels.
        candidate_sq: sum of the candidate's squares.
        max_abs, max_rel: over all elements.
        nonfinite: count.
        differing: for integers: indices of the differing rows; ``None`` for floats.
    """

    shape: tuple[int, ...]
    token_err: NDArray[np.float64]
    token_ref: NDArray[np.float64]
    channel_err: NDArray[np.float64]
    channel_ref: NDArray[np.float64]
    candidate_sq: float
    max_abs: float
    max_rel: float
    nonfinite: int
    differing: NDArray[np.int64] | None = None
    indices: NDArray[np.int64] | None = None

    def at(self, indices: Sequence[int]) -> Block:
        """The same block with its rows placed in the whole."""
        assert len(indices) == self.shape[0]
        return Block(**{**self.__dict__, "indices": np.asarray(indices, np.int64)})


def measure_block(candidate: torch.Tensor, reference: torch.Tensor) -> Block:
    """The sums of :class:`Block`.

    Raises:
        ValueError: as :func:`measure`.
    """
    if candidate.shape != reference.shape:
        raise ValueError(f"shapes differ: {list(candidate.shape)} and {list(reference.shape)}")
    if candidate.dim() == 0:
        raise ValueError("a tensor without a row axis")
    floating = candidate.is_floating_point()
    if floating != reference.is_floating_point():
        raise ValueError(f"dtypes differ in kind: {_short(candidate)} and {_short(reference)}")
    shape = tuple(candidate.shape)
    rows, channels = shape[0], prod(shape[1:])
    if not floating:
        return _integers(candidate, reference, shape)
    token_err, token_ref = np.zeros(rows), np.zeros(rows)
    channel_err, channel_ref = np.zeros(channels), np.zeros(channels)
    totals = _Totals()
    a, b = candidate.detach().cpu().reshape(rows, channels), reference.detach().cpu().reshape(rows, channels)
    step = max(1, CHUNK // max(1, channels))
    size = min(step, rows) * channels
    buffers = _buffers(size)
    for start in range(0, rows if channels else 0, step):
        stop = min(rows, start + step)
        x, y, diff = (buffer[: (stop - start) * channels].view(stop - start, channels) for buffer in buffers)
        x.copy_(a[start:stop])
        y.copy_(b[start:stop])
        torch.sub(x, y, out=diff)
        totals.add(x, y, diff)
        for values, of_tokens, of_channels in ((diff, token_err, channel_err), (y, token_ref, channel_ref)):
            values.mul_(values)
            of_tokens[start:stop] = values.sum(1).numpy()
            of_channels += values.sum(0).numpy()
    return Block(shape, token_err, token_ref, channel_err, channel_ref, **totals.__dict__)


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_reused = threading.local()


def _buffers(size: int) -> list[torch.Tensor]:
    """Three float32 buffers of ``size`` elements that the next call on this thread gets again."""
    if getattr(_reused, "size", 0) < size:
        _reused.buffers, _reused.size = [torch.empty(size) for _ in range(3)], size
    found: list[torch.Tensor] = _reused.buffers
    return found


@dataclass
class _Totals:
    candidate_sq: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nonfinite: int = 0

    def add(self, x: torch.Tensor, y: torch.Tensor, diff: torch.Tensor) -> None:
        """Take one chunk in; repairs non-finite elements of all three in place (finite, or an infinite difference)."""
        low, high = (float(bound) for bound in diff.aminmax())
        if not (abs(low) < inf and abs(high) < inf):  # NaN fails too; finite extremes mean finite elements
            self._repair(x, y, diff)
            low, high = (float(bound) for bound in diff.aminmax())
        self.max_abs = max(self.max_abs, -low, high)
        flat = x.view(-1)
        self.candidate_sq += float(torch.dot(flat, flat))
        if high > 0 or low < 0:
            torch.abs(y, out=x).clamp_(min=CLAMP)
            low, high = (float(bound) for bound in torch.div(diff, x, out=x).aminmax())
            self.max_rel = max(self.max_rel, -low, high)

    def _repair(self, x: torch.Tensor, y: torch.Tensor, diff: torch.Tensor) -> None:
        bad = ~(torch.isfinite(x) & torch.isfinite(y))
        agree = (x == y) | (torch.isnan(x) & torch.isnan(y))
        self.nonfinite += int(bad.sum())
        diff[bad & ~agree] = inf
        diff[bad & agree] = 0.0
        x[bad] = 0.0
        y[bad] = 0.0


def _integers(candidate: torch.Tensor, reference: torch.Tensor, shape: tuple[int, ...]) -> Block:
    nothing = np.zeros(0)
    if same_bits(candidate, reference):
        differing = np.zeros(0, np.int64)
    else:
        unequal = (candidate.cpu() != reference.cpu()).reshape(shape[0], -1).any(1)
        differing = np.flatnonzero(unequal.numpy())
    return Block(shape, nothing, nothing, nothing, nothing, 0.0, 0.0, 0.0, 0, differing)


def join(blocks: Sequence[Block]) -> Metrics:
    """Metrics of all rows of several blocks of the same channels and kind of dtype."""
    assert blocks
    shapes = {block.shape[1:] for block in blocks}
    if len(shapes) > 1:
        raise ValueError(f"channels differ between blocks: {sorted(shapes)}")
    channels = shapes.pop()
    elements = sum(prod(block.shape) for block in blocks)
    indices = np.concatenate(
        [np.arange(block.shape[0]) if block.indices is None else block.indices for block in blocks]
    )
    differing = [
        block.differing if block.indices is None else block.indices[block.differing]
        for block in blocks
        if block.differing is not None
    ]
    if differing:
        rows = np.sort(np.concatenate(differing))
        named = tuple(int(row) for row in rows[:NAMED_ROWS])
        return Metrics(not rows.size, None, None, None, None, None, None, None, elements, 0, named, int(rows.size))
    token_err = np.concatenate([block.token_err for block in blocks])
    token_ref = np.concatenate([block.token_ref for block in blocks])
    channel_err = np.sum([block.channel_err for block in blocks], axis=0)
    channel_ref = np.sum([block.channel_ref for block in blocks], axis=0)
    err, ref = float(token_err.sum()), float(token_ref.sum())
    max_abs = max(block.max_abs for block in blocks)
    token = _worst(token_err, token_ref)
    head = None
    if len(channels) == 2:
        head = _worst(channel_err.reshape(channels).sum(1), channel_ref.reshape(channels).sum(1))
    return Metrics(
        equal=max_abs == 0.0,
        max_abs=max_abs,
        max_rel=max(block.max_rel for block in blocks),
        rel_l2=_ratio(err, ref),
        cosine=_cosine(err, sum(block.candidate_sq for block in blocks), ref),
        worst_token=None if token is None else Worst(int(indices[token.index]), token.rel_l2),
        worst_channel=_worst(channel_err, channel_ref),
        worst_head=head,
        elements=elements,
        nonfinite=sum(block.nonfinite for block in blocks),
    )


def _ratio(err_sq: float, ref_sq: float) -> float:
    if err_sq == 0.0:
        return 0.0
    return inf if ref_sq == 0.0 else sqrt(err_sq / ref_sq)


def _cosine(err_sq: float, candidate_sq: float, reference_sq: float) -> float:
    """From the law of cosines, with the digits of ``1 - cosine`` that a quotient of large sums would lose."""
    if err_sq == 0.0:
        return 1.0
    a, b = sqrt(candidate_sq), sqrt(reference_sq)
    if not (a > 0.0 and b > 0.0 and isfinite(err_sq)):
        return nan
    return max(-1.0, 1.0 - (err_sq - (a - b) ** 2) / (2 * a * b))


def _worst(err_sq: NDArray[np.float64], ref_sq: NDArray[np.float64]) -> Worst | None:
    """The slice of the largest relative error; ``None`` if there is none."""
    if not err_sq.size:
        return None
    floor = SLICE_FLOOR**2 * float(np.median(ref_sq))
    below = np.maximum(ref_sq, floor)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(err_sq == 0.0, 0.0, err_sq / below)
    index = int(np.argmax(relative))
    return Worst(index, sqrt(float(relative[index])))
