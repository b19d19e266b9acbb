"""Which experts the sides used, so that golden follows them, and where they used different ones.

Where a router is at a near-tie, golden's own choice decides nothing: it is one of two right ones. So golden takes the
experts of the reference, with weights of its own; what the sides computed with different ones, and what attention makes
of it later in the request, is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from align.checkpoints.table import kinds
from align.compare.gather import gather
from align.compare.routes import IDS
from align.compare.rows import Recorded, RowKey, read_rows
from align.trace.format import USED

Tensor = torch.Tensor


def used_by(trace: Recorded) -> dict[int, dict[RowKey, Tensor]]:
    """By layer, the experts ``[top_k]`` of each row: those that were used, where its routing was replayed."""
    structure = trace.structure
    if structure is None or not structure.has(kinds()[IDS]):
        return {}
    places = read_rows(trace).places
    keys = list(places)
    found: dict[int, dict[RowKey, Tensor]] = {}
    for layer in range(structure.layers):
        name = kinds()[IDS].at(layer)
        for one in (name, name + USED):
            value = gather(trace, one, [places[key] for key in keys])
            if value is not None:
                own = {keys[row]: value.tensor[index] for index, row in enumerate(value.rows)}
                found[layer] = {**found.get(layer, {}), **own}
    return found


def experts_of(used: Mapping[int, Mapping[RowKey, Tensor]], request: str, length: int) -> dict[int, Tensor]:
    """By layer, int64 ``[length, top_k]`` of one request; rows of −1 are not known. What was computed first counts."""
    found = {}
    for layer, rows in used.items():
        mine = {key.position: ids for key, ids in rows.items() if key.request == request and not key.occurrence}
        if mine:
            whole = torch.full((length, len(next(iter(mine.values())))), -1, dtype=torch.int64)
            for position, ids in mine.items():
                if position < length:
                    whole[position] = ids
            found[layer] = whole
    return found


def digest_of(experts: Mapping[int, Tensor]) -> str:
    """A short name of a choice, by which a recording of it is known again."""
    digest = hashlib.sha256()
    for layer, ids in sorted(experts.items()):
        digest.update(f"{layer} {tuple(ids.shape)}".encode() + ids.numpy().tobytes())
    return digest.hexdigest()[:16]


def first_apart(
    candidate: Mapping[int, Mapping[RowKey, Tensor]], reference: Mapping[int, Mapping[RowKey, Tensor]]
) -> dict[str, int]:
    """Request → the first position at which the sides used different experts, in any layer."""
    found: dict[str, int] = {}
    for layer in candidate.keys() & reference.keys():
        for key in candidate[layer].keys() & reference[layer].keys():
            if not torch.equal(candidate[layer][key], reference[layer][key]):
                found[key.request] = min(key.position, found.get(key.request, key.position))
    return found
