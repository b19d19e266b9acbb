"""What a lean recording keeps: digests of a few rows of each request, and the worst of each operator's own error.

Every operator is recomputed as in a whole recording. Only what is written is less: of a phase's channels and rows those
that a judge would look at, and the sums over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.base import RowSpan

Tensor = torch.Tensor
#: Kept of each checkpoint and phase; half by the size of their factor, half by its certainty.
TOP_CHANNELS, TOP_ROWS = 8, 4


def _power_of_four(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


class RowChoice:
    """Chooses the rows whose digests are kept, by position alone, so that both sides choose alike.

    Of a prompt its last row and those at positions 0, 3, 15, 63, …; of what is generated the rows 1, 4, 16, 64, …
    """

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def choose(self, rows: Sequence[RowSpan]) -> tuple[int, ...]:
        """Indices into the step's rows, ascending."""
        chosen, start = [], 0
        for span in rows:
            end = self._ends.setdefault(span.request, span.start + span.count)
            for index in range(span.count):
                position = span.start + index
                if _power_of_four(position + 1 if position < end else position - end + 1) or position == end - 1:
                    chosen.append(start + index)
            start += span.count
        return tuple(chosen)


def heads_of(rows: Sequence[RowSpan], chosen: Sequence[int]) -> tuple[int, ...]:
    """Which of the rows that reach the head, the last of each span, are among the ``chosen`` rows of the step."""
    wanted, found, end = set(chosen), [], 0
    for head, span in enumerate(rows):
        end += span.count
        if end - 1 in wanted:
            found.append(head)
    return tuple(found)


def top_channels(sums: Tensor) -> Tensor:
    """The channels whose factor is farthest from 1.

    Args:
        sums: float32 ``[3, *channels]``: e², r², e·r of each channel, see :mod:`align.compare.residual`.

    Returns:
        float32 ``[K, 4]``: flat channel, e², r², e·r.
    """
    flat = sums.reshape(3, -1).T
    gain, certain = _scores(flat)
    half = min(TOP_CHANNELS // 2, len(flat))
    chosen = torch.cat((gain.topk(half).indices, certain.topk(half).indices)).unique()
    return torch.cat((chosen[:, None].float(), flat[chosen]), 1)


def head_sums(sums: Tensor) -> Tensor:
    """Sums over the channels of each head, float32 ``[H, 3]``; without an axis of heads there is one."""
    return sums.double().sum(-1).reshape(3, -1).T.float()


class TopRows:
    """Of one kind of checkpoint in one phase: sums over all recomputed rows, and the worst rows, layer by layer."""

    def __init__(self, layers: int) -> None:
        self._totals = torch.zeros(layers, 4)
        self._worst = torch.full((layers, TOP_ROWS, 5), torch.nan)

    def add(self, step: int, rows: Tensor, tokens: Tensor, good: Tensor) -> None:
        """Add a step's rows.

        Args:
            step: number of the step.
            rows: int64 ``[R]``, indices into the step's rows.
            tokens: float32 ``[L, R, 3]``: e², r², e·r; NaN where a row could not be recomputed.
            good: bool ``[L]``, layers that count.
        """
        if not len(rows):
            return
        tokens = tokens.masked_fill(~good[:, None, None], torch.nan)
        known = ~tokens.isnan().any(2)
        self._totals[:, 0] += known.sum(1)
        self._totals[:, 1:] += tokens.masked_fill(~known[:, :, None], 0.0).sum(1)
        where = torch.stack((torch.full((len(rows),), float(step)), rows.float()), 1)
        every = torch.cat((self._worst, torch.cat((where.expand(len(tokens), -1, -1), tokens), 2)), 1)
        gain, norm = _scores(every[:, :, 2:])[0], every[:, :, 2]
        first = gain.topk(TOP_ROWS // 2, dim=1).indices
        norm = norm.nan_to_num(nan=-1.0).scatter(1, first, -2.0)  # not the same row twice
        second = norm.topk(TOP_ROWS - TOP_ROWS // 2, dim=1).indices
        chosen = torch.cat((first, second), 1)
        self._worst = every.gather(1, chosen[:, :, None].expand(-1, -1, 5))

    def layer(self, layer: int) -> Tensor:
        """float32 ``[1 + K, 5]``: in the first row the count of rows, 0, and the sums e², r², e·r over all of them;

        then the worst rows: step, index into the step's rows, e², r², e·r; NaN where there are fewer.
        """
        count, *sums = self._totals[layer]
        first = torch.stack((count, torch.zeros(()), *sums))
        return torch.cat((first[None], self._worst[layer]))


def _scores(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of sums ``[…, 3]``: size of the factor's distance from 1, and that in its own deviations; −1 if unknown."""
    squared, product = sums[..., 1], sums[..., 2].abs()
    gain = (product / squared).nan_to_num(nan=-1.0, posinf=-1.0)
    certain = (product / squared.sqrt()).nan_to_num(nan=-1.0, posinf=-1.0)
    return gain, certain
