"""Random projections of what a step recorded, for all layers of a kind at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.lean import heads_of
from align.checkpoints.shards import Shard
from align.checkpoints.table import kinds
from align.trace.digest import channel_signs, digest, token_signs
from align.trace.format import CHANNEL_DIGEST, CHANNEL_SQUARES, TOKEN_DIGEST, TOKEN_SQUARES


class DigestPass:
    """The digests of one run and rank.

    Args:
        shards: this rank's part of each kind that is split.
        seed: of the signs; the same on every rank and side.
        lean: digest the chosen rows only, and no channels.
    """

    def __init__(self, shards: Mapping[str, Shard], seed: int, lean: bool = False) -> None:
        self._shards, self._seed, self._lean = shards, seed, lean
        self._signs: dict[str, Tensor] = {}
        #: Phase → kind → sums ``[layers, 4, C]`` and ``[layers, C]``, and the layers that they hold.
        self._sums: dict[str, dict[str, _Sums]] = {}

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
        self,
        rows: Sequence[RowSpan],
        phase: str,
        values: Mapping[str, Tensor],
        present: Mapping[str, set[int]],
        chosen: Sequence[int] = (),
    ) -> dict[str, Tensor]:
        """Digest one step.

        Args:
            chosen: of a lean recording: indices of the rows that are digested.
            values: kind → ``[layers, T, …]``; the logits have one row per request.
            present: kind → layers that hold something.

        Returns:
            Keys of a step file.
        """
        spans = [(row.request, row.start + at, row.occurrence) for row in rows for at in range(row.count)]
        signs = None if self._lean else self._token_signs(spans)
        heads = heads_of(rows, chosen)
        if self._lean and not chosen:
            return {}
        sums = self._sums.setdefault(phase, {})
        found: dict[str, Tensor] = {}
        for kind, layers in present.items():
            if kinds()[kind].integer:
                continue
            flat, shape = values[kind].flatten(2), values[kind].shape[2:]
            if self._lean:
                picked = chosen if flat.shape[1] == len(spans) and kinds()[kind].axes[0] == "tokens" else heads
                flat = flat[:, list(picked)]
            # The vocabulary's channels would outweigh all others.
            along = kinds()[kind].axes[0] == "tokens" and not self._lean
            parts = digest(flat, self._channel_signs(kind, shape), signs if along else None)
            for layer in sorted(layers):
                name = kinds()[kind].at(layer if kinds()[kind].per_layer else None)
                found[f"{name}{TOKEN_DIGEST}"], found[f"{name}{TOKEN_SQUARES}"] = parts[0][layer], parts[1][layer]
            if along:
                sums.setdefault(kind, _Sums(tuple(shape))).add(parts[2], parts[3], layers)
        return found

    def _token_signs(self, rows: Sequence[tuple[str, int, int]]) -> Tensor:
        requests, positions, occurrences = zip(*rows, strict=True)
        return token_signs(list(requests), list(positions), list(occurrences), self._seed)

    def accumulated(self, phase: str) -> dict[str, Tensor]:
        """Channel digests over the steps of a phase, copied."""
        found = {}
        for kind, sums in self._sums.get(phase, {}).items():
            for layer in sorted(sums.layers):
                name = kinds()[kind].at(layer if kinds()[kind].per_layer else None)
                for suffix, part in ((CHANNEL_DIGEST, sums.projected), (CHANNEL_SQUARES, sums.squares)):
                    found[f"{name}{suffix}"] = part[layer].unflatten(-1, sums.shape).clone()
        return found


class _Sums:
    """Sums over steps of one kind."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.layers: set[int] = set()
        self.projected = self.squares = torch.empty(0)

    def add(self, projected: Tensor, squares: Tensor, layers: Iterable[int]) -> None:
        """Add a step's ``[L, 4, C]`` and ``[L, C]``, of which only ``layers`` mean something."""
        known = sorted(layers)
        if not self.layers:
            self.projected, self.squares = torch.zeros_like(projected), torch.zeros_like(squares)
        whole = len(known) == len(projected)
        for total, part in ((self.projected, projected), (self.squares, squares)):
            if whole:
                total += part
            else:
                total[known] += part[known]
        self.layers.update(known)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
