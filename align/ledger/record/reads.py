"""What a worker keeps between steps so that only surprising cache rows are recorded.

The whole history is hashed at every read; of what was found, only sums that differ from what the same request wrote or
last found at that position are kept. A position's sums are thus recorded once or twice in a right run: 16 bytes as
written, or 28 as found if it came from a prefix hit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from align.ledger.record.types import Found

#: What the sums of a (token, layer) may take.
BYTES = 32
#: Of one pair of sums as written, and as found along with its place.
_WRITTEN, _FOUND = 16, 28
_ROOM = 64


class ReadMemory:
    """Sums of the cache rows of every request, as they should be when they are read next.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._known: dict[str, Tensor] = {}
        self._where: list[Tensor] = []
        self._found: list[Tensor] = []
        self._new = 0

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._sums.pop(request, None)
        self._known.pop(request, None)

    def wrote(self, request: str, start: int, sums: Tensor) -> None:
        """Positions from ``start`` were written: int64 ``[layers, count, 2]``."""
        end = start + sums.shape[1]
        held, known = self._room(request, end)
        held[:, start:end] = sums
        known[start:end] = True

    def read(self, request: str, span: int, sums: Tensor) -> None:
        """Positions from 0 were found to hold these sums, int64 ``[layers, kv_len, 2]``; ``span`` is its row."""
        count = sums.shape[1]
        held, known = self._room(request, count)
        differs = (held[:, :count] != sums).any(-1) | ~known[:count]
        self._new += int((~known[:count]).sum()) * self._layers
        place = differs.nonzero()
        if place.shape[0]:
            layer, position = place.unbind(-1)
            self._where.append(torch.stack([layer, torch.full_like(layer, span), position], -1).int())
            self._found.append(sums[layer, position])
            held[:, :count] = sums
            known[:count] = True

    def take(self, tokens: int) -> Found:
        """What was found since the last call, what was seen for the first time and a share of the rest.

        The share is such that sums as written and as found take no more than :data:`BYTES` per (token, layer).

        Args:
            tokens: that the step computed.
        """
        where = torch.cat(self._where) if self._where else Found().where
        sums = torch.cat(self._found) if self._found else Found().sums
        limit = self._new + max(1, tokens * self._layers * (BYTES - _WRITTEN) // _FOUND)
        self._where, self._found, self._new = [], [], 0
        return Found(where[:limit].contiguous(), sums[:limit].contiguous(), int(where.shape[0]))

    def _room(self, request: str, end: int) -> tuple[Tensor, Tensor]:
        held = self._sums.get(request)
        if held is None or held.shape[1] < end:
            size = max(_ROOM, 1 << (end - 1).bit_length())
            larger = torch.zeros((self._layers, size, 2), dtype=torch.int64)
            known = torch.zeros(size, dtype=torch.bool)
            if held is not None:
                larger[:, : held.shape[1]] = held
                known[: held.shape[1]] = self._known[request]
            self._sums[request], self._known[request] = larger, known
        return self._sums[request], self._known[request]
