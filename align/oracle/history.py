"""The keys and values that attention reads: what the side itself recorded for a request, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from align.checkpoints.table import kinds
from align.oracle.rows import Overrides, Reader
from align.oracle.types import NotObservableError
from align.trace.format import StepEntry

Tensor = torch.Tensor


@dataclass
class _Request:
    keys: Tensor  # [capacity, kv_heads, head_dim]
    values: Tensor
    known: Tensor  # bool [capacity]


class Histories:
    """Keys and values of all requests in one layer, advanced step by step.

    What a step did not record is unknown, also if an earlier step recorded the position: it was written again.
    """

    def __init__(self, reader: Reader, layer: int) -> None:
        self._reader = reader
        self._names = [kinds()[kind].at(layer) for kind in ("attn.key_states", "attn.value_states")]
        self._requests: dict[str, _Request] = {}
        #: Why positions are unknown, by step.
        self.missing: dict[int, str] = {}

    def advance(self, entry: StepEntry, overrides: Overrides) -> None:
        """Take in what a step wrote."""
        try:
            keys, values = (self._reader.value(name, entry, -1, overrides) for name in self._names)
            total = sum(span.count for span in entry.rows)
            if keys.shape != values.shape or len(keys) != total:
                shapes = f"{list(keys.shape)} and {list(values.shape)}"
                raise NotObservableError(f"keys and values of shapes {shapes} in a step of {total} rows")
        except NotObservableError as error:
            self.missing[entry.step] = str(error)
            for span in entry.rows:
                request = self._requests.get(span.request)
                if request is not None:
                    request.known[span.start : span.start + span.count] = False
            return
        start = 0
        for span in entry.rows:
            request = self._room(span.request, span.start + span.count, keys)
            here, there = slice(start, start + span.count), slice(span.start, span.start + span.count)
            request.keys[there], request.values[there], request.known[there] = keys[here], values[here], True
            start += span.count

    def _room(self, name: str, needed: int, like: Tensor) -> _Request:
        found = self._requests.get(name)
        if found is None:
            empty = like.new_zeros((0, *like.shape[1:]))
            found = self._requests[name] = _Request(empty, empty.clone(), torch.zeros(0, dtype=torch.bool))
        more = max(needed, 2 * len(found.known)) - len(found.known) if needed > len(found.known) else 0
        if more:
            space = like.new_zeros((more, *like.shape[1:]))
            found.keys, found.values = torch.cat((found.keys, space)), torch.cat((found.values, space))
            found.known = torch.cat((found.known, torch.zeros(more, dtype=torch.bool)))
        return found

    def read(self, request: str, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """What rows at ``positions`` ``[R]`` of a request see.

        Returns:
            Keys and values ``[S, kv_heads, head_dim]`` of positions ``0 … S - 1`` (zeros where unknown), and bool
            ``[R]``: for which rows all that they see is known.
        """
        end = int(positions.max()) + 1
        found = self._requests.get(request)
        if found is None or len(found.known) < end:
            return torch.empty(0), torch.empty(0), torch.zeros(len(positions), dtype=torch.bool)
        unknown = torch.cat((torch.zeros(1, dtype=torch.int64), (~found.known[:end]).long().cumsum(0)))
        first = torch.zeros_like(positions) if window is None else (positions + 1 - window).clamp_min(0)
        return found.keys[:end], found.values[:end], unknown[positions + 1] == unknown[first]
