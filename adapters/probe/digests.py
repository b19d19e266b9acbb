"""Random projections of what a step recorded, for all layers of a kind at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adapters.base import RowSpan
from align.checkpoints.shards import Shard
from align.checkpoints.table import Name, kinds
from align.trace.digest import channel_signs, digest_channels, digest_tokens, token_signs
from align.trace.format import CHANNEL_DIGEST, CHANNEL_SQUARES, TOKEN_DIGEST, TOKEN_SQUARES


class DigestPass:
    """The digests of one run and rank.

    Args:
        names: the checkpoints of the model.
        shards: this rank's part of each kind that is split.
        seed: of the signs; the same on every rank and side.
    """

    def __init__(self, names: Iterable[Name], shards: Mapping[str, Shard], seed: int) -> None:
        self._names = [name for name in names if not name.kind.integer]
        self._shards, self._seed = shards, seed
        self._signs: dict[str, Tensor] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}

    def _channel_signs(self, kind: str, channels: Sequence[int]) -> Tensor:
        """``[C, 8]`` for this rank's channels, by their place in the whole tensor."""
        if kind not in self._signs:
            whole = torch.arange(_product(channels)).reshape(tuple(channels))
            shard, axis = self._shards.get(kind), kinds()[kind].shard
            if shard is not None and axis:
                place = kinds()[kind].axes.index(axis) - 1
                inner = _product(channels[place + 1 :])
                total = [*channels]
                total[place] = shard.total
                whole = torch.arange(_product(total)).reshape(total).narrow(place, shard.start, channels[place])
                assert inner * total[place] <= _product(total)
            self._signs[kind] = channel_signs(kind, whole.reshape(-1), self._seed)
        return self._signs[kind]

    def step(
        self, rows: Sequence[RowSpan], phase: str, values: Mapping[str, Tensor], present: Mapping[str, set[int]]
    ) -> dict[str, Tensor]:
        """Digest one step.

        Args:
            values: kind → ``[layers, T, …]``; the logits have one row per request.
            present: kind → layers that hold something.

        Returns:
            Keys of a step file.
        """
        spans = [(row.request, row.start + at, row.occurrence) for row in rows for at in range(row.count)]
        lasts = [(row.request, row.start + row.count - 1, row.occurrence) for row in rows]
        signs = {"tokens": self._token_signs(spans), "requests": self._token_signs(lasts)}
        sums = self._sums.setdefault(phase, {})
        tokens: dict[str, tuple[Tensor, Tensor]] = {}
        channels: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in present:
            if kinds()[kind].integer:
                continue
            flat = values[kind].flatten(2)
            tokens[kind] = digest_tokens(flat, self._channel_signs(kind, values[kind].shape[2:]))
            if kinds()[kind].axes[0] == "tokens":  # the vocabulary's channels would outweigh all others
                channels[kind] = digest_channels(flat, signs["tokens"])
        found: dict[str, Tensor] = {}
        for name in self._names:
            kind, layer = name.kind.name, 0 if name.layer is None else name.layer
            if layer not in present.get(kind, ()):
                continue
            projected, squares = tokens[kind]
            found[f"{name}{TOKEN_DIGEST}"] = projected[layer]
            found[f"{name}{TOKEN_SQUARES}"] = squares[layer]
            if kind in channels:
                shape = values[kind].shape[2:]
                for suffix, part in zip((CHANNEL_DIGEST, CHANNEL_SQUARES), channels[kind], strict=True):
                    term = part[layer].unflatten(-1, shape)
                    key = f"{name}{suffix}"
                    sums[key] = term.clone() if key not in sums else sums[key].add_(term)
        return found

    def _token_signs(self, rows: Sequence[tuple[str, int, int]]) -> Tensor:
        requests, positions, occurrences = zip(*rows, strict=True)
        return token_signs(list(requests), list(positions), list(occurrences), self._seed)

    def accumulated(self, phase: str) -> dict[str, Tensor]:
        """Channel digests over the steps of a phase."""
        return dict(self._sums.get(phase, {}))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
