"""Distances between two sides' tensors of which only random projections were recorded."""

from __future__ import annotations

from math import sqrt

import torch

from align.checkpoints.table import parse
from align.compare.metrics import SLICE_FLOOR, Metrics, Worst
from align.compare.rows import Recorded, digested_heads, ranks_of, real_steps
from align.trace.digest import channel_signs, digest_tokens, estimate_rel_l2
from align.trace.format import TOKEN_DIGEST, TOKEN_SQUARES


def joined_digest(trace: Recorded, step: int, name: str) -> torch.Tensor | None:
    """The projections and sum of squares of each token of the whole tensor, float32 ``[T, 8 + 1]``.

    Digests of shards and of summands add up; the squares of a sum are estimated from its projections. Where values were
    recorded instead, the digest is made of them.

    Raises:
        ValueError: ranks that hold copies have different digests, or a file is damaged.
    """
    kind = parse(name).kind
    pieces: dict[int, torch.Tensor] = {}
    for rank in ranks_of(trace, step):
        projected = trace.tensor(rank, step, name + TOKEN_DIGEST)
        squares = trace.tensor(rank, step, name + TOKEN_SQUARES)
        if projected is None or squares is None:
            if kind.name == "logits":
                continue  # sampled on some ranks only
            return _of_values(trace, step, name)
        shard = trace.shard(rank, kind.name)
        place = rank if kind.shard == "partial" else 0 if shard is None else shard.start
        digest = torch.cat((projected.float(), squares.float()[:, None]), 1)
        if not torch.equal(pieces.setdefault(place, digest), digest):
            raise ValueError(f"step {step}: {name} differs between ranks that hold copies")
    if not pieces:
        return _of_values(trace, step, name)
    whole = torch.stack(list(pieces.values())).sum(0)
    if kind.shard == "partial" and len(pieces) > 1:
        whole[:, -1] = whole[:, :-1].square().mean(1)
    return whole


def _of_values(trace: Recorded, step: int, name: str) -> torch.Tensor | None:
    """The digest of recorded values, ``[T, 8 + 1]``; ``None`` if there are none."""
    values = trace.joined(step, name)
    if values is None:
        return None
    entry = next(one for one in real_steps(trace) if one.step == step)
    if entry.digested is not None:  # as much as if it had been digested
        rows = entry.digested if len(values) == sum(span.count for span in entry.rows) else digested_heads(entry)
        if not rows:
            return None
        values = values[list(rows)]
    flat = values.flatten(1)
    seed = int((trace.manifest.get("capture") or {}).get("seed", 0))
    signs = channel_signs(parse(name).kind.name, torch.arange(flat.shape[1]), seed)
    projected, squares = digest_tokens(flat[None], signs)
    return torch.cat((projected[0], squares[0][:, None]), 1)


def estimate(candidate: torch.Tensor, reference: torch.Tensor) -> Metrics:
    """Metrics of :func:`joined_digest` of both sides, ``[N, 8 + 1]``: relative L2 of the whole and of the worst token.

    Never ``equal``: a digest cannot prove it.
    """
    squares = reference[:, -1].double()
    distance = (candidate[:, :-1].double() - reference[:, :-1].double()).square().mean(1)
    total, apart = float(squares.sum()), float(distance.sum())
    whole = sqrt(apart / total) if total > 0 else float("inf") if apart else 0.0
    worst = None
    if len(squares):
        # As for values: a token far smaller than the others has the noise of the others.
        below = squares.clamp(min=SLICE_FLOOR**2 * float(squares.median()))
        each = estimate_rel_l2(candidate[:, :-1], reference[:, :-1], below)
        worst = Worst(int(each.argmax()), float(each.max()))
    nonfinite = int((~torch.isfinite(candidate) | ~torch.isfinite(reference)).any(1).sum())
    return Metrics(False, None, None, whole, None, worst, None, None, 0, nonfinite)
