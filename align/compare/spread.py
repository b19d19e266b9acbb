"""How the distance between two sides is spread over rows, steps, channels and heads of one checkpoint.

The verdict does not rest on it: it is what a person looks at to see whether all rows are a little off, or one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from align.compare.metrics import SLICE_FLOOR, Block
from align.compare.rows import PairedRow

#: Shares of the rows whose relative L2 is at most the quantile of the same place.
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
#: Rows, channels and heads that are named, the worst first.
NAMED = 5


@dataclass(frozen=True)
class Spread:
    """Relative L2 by slices; the slices are those of :mod:`align.compare.metrics`, with the same denominators.

    Attributes:
        quantiles: of the rows, at :data:`SHARES`.
        steps: (candidate's step, relative L2 of the rows that it computed), in order of steps.
        rows: (request, position, relative L2) of the worst rows.
        channels: (flat canonical channel, relative L2) of the worst channels.
        heads: (head, relative L2) of the worst heads; empty without a head axis.
    """

    quantiles: tuple[float, ...]
    steps: tuple[tuple[int, float], ...]
    rows: tuple[tuple[str, int, float], ...]
    channels: tuple[tuple[int, float], ...]
    heads: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; numbers that are not finite become text."""
        found: dict[str, Any] = _plain(asdict(self))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def spread_of(blocks: Sequence[Block], rows: Sequence[PairedRow]) -> Spread | None:
    """Of the blocks that :func:`align.compare.metrics.join` takes; ``None`` of integers, or without an element.

    Args:
        rows: all of them, in the order that the blocks' indices count.
    """
    if not blocks or any(block.differing is not None for block in blocks):
        return None
    indices = np.concatenate(
        [np.arange(block.shape[0]) if block.indices is None else block.indices for block in blocks]
    )
    err = np.concatenate([block.token_err for block in blocks])
    ref = np.concatenate([block.token_ref for block in blocks])
    if not err.size or not rows:
        return None
    channels = blocks[0].shape[1:]
    channel_err = np.sum([block.channel_err for block in blocks], axis=0)
    channel_ref = np.sum([block.channel_ref for block in blocks], axis=0)
    relative = _relative(err, ref)
    computed = np.fromiter((rows[at].candidate.step for at in indices.tolist()), np.int64, len(indices))
    steps, of_step = np.unique(computed, return_inverse=True)
    step_err, step_ref = np.bincount(of_step, err), np.bincount(of_step, ref)
    heads: tuple[tuple[int, float], ...] = ()
    if len(channels) == 2:
        heads = _worst(_relative(channel_err.reshape(channels).sum(1), channel_ref.reshape(channels).sum(1)))
    ordered = np.sort(relative)
    return Spread(
        quantiles=tuple(float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in SHARES),
        steps=tuple(
            (step, _whole(*sums))
            for step, *sums in zip(steps.tolist(), step_err.tolist(), step_ref.tolist(), strict=True)
        ),
        rows=tuple(
            (rows[int(indices[at])].key.request, rows[int(indices[at])].key.position, value)
            for at, value in _worst(relative)
        ),
        channels=_worst(_relative(channel_err, channel_ref)),
        heads=heads,
    )


def _relative(err: NDArray[np.float64], ref: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative L2 of slices from sums of squares; one near zero is measured by :data:`SLICE_FLOOR` of the median."""
    if not err.size:
        return np.zeros(0)
    below = np.maximum(ref, SLICE_FLOOR**2 * float(np.median(ref)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.where(err == 0.0, 0.0, err / below))


def _whole(err: float, ref: float) -> float:
    if err == 0.0:
        return 0.0
    return float("inf") if ref == 0.0 else sqrt(err / ref)


def _worst(values: NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    """The largest that are not zero, the worst first."""
    order = np.argsort(-values, kind="stable")[:NAMED]
    return tuple((int(at), float(values[at])) for at in order if values[at] > 0)
