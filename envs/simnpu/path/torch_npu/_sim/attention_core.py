"""Attention of one sequence, and the keys and values that it reads: the core of all attention operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .numerics import is_native

Tensor = torch.Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    masked: Tensor | None = None,
    sink: Tensor | None = None,
    want_total: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (output, log of the sum of the exponentials of the scores, if wanted) of one sequence.

    query [T, N, D], key [S, KV, D], value [S, KV, Dv], N a multiple of KV; `masked` bool, broadcastable to
    [T, S], true where a query must not look; `sink` [N], one more score for each head that takes weight but
    has no value. Output [T, N, Dv] in the dtype of `query`, the logarithm float32 [T, N]. A query that may
    look nowhere gets zeros, and +inf as its logarithm (without a sink).
    """
    tokens, num_heads, _ = query.shape
    span, num_kv_heads, width = value.shape
    if span == 0 or tokens == 0:
        empty = query.new_zeros(tokens, num_heads, width)
        return empty, torch.full((tokens, num_heads), torch.inf) if want_total else None
    groups = num_heads // num_kv_heads
    if is_native():
        # One product for each query head, as in transformers, where keys and values are repeated.
        every_key = key.transpose(0, 1).repeat_interleave(groups, dim=0)
        scores = torch.matmul(query.transpose(0, 1), every_key.transpose(1, 2)) * scale
    else:
        # The heads of a group share their keys, so they form the rows of one product.
        grouped = query.float().view(tokens, num_kv_heads, groups, -1).permute(1, 2, 0, 3)
        grouped = grouped.reshape(num_kv_heads, groups * tokens, -1)
        scores = torch.matmul(grouped, key.float().permute(1, 2, 0)).view(num_heads, tokens, span) * scale
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype).view(-1, 1, 1).expand(-1, tokens, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :span]
    if masked is not None:
        # Without a single score softmax gives NaN.
        weights = weights.masked_fill(masked.all(dim=-1, keepdim=True), 0.0)
    if is_native():
        output = torch.matmul(weights.to(query.dtype), value.transpose(0, 1).repeat_interleave(groups, dim=0))
    else:
        shared = weights.reshape(num_kv_heads, groups * tokens, span)
        output = torch.matmul(shared, value.float().transpose(0, 1)).view(num_heads, tokens, width)
    total: Tensor | None = None
    if want_total:
        total = torch.logsumexp(scores.float(), dim=-1)
        total = total.masked_fill(torch.isneginf(total), torch.inf).transpose(0, 1)
    return output.transpose(0, 1).to(query.dtype), total


def band(tokens: int, span: int, before: int | None, after: int | None, offset: int) -> Tensor | None:
    """Return the mask [T, S] of queries that see only keys near their own position, or None if it masks
    nothing.

    Query i stands at key i + offset. It sees `before` keys before that and `after` keys after it; None is no
    limit.
    """
    first, last = offset, offset + tokens - 1
    hides_after = after is not None and first + after < span - 1
    hides_before = before is not None and last - before > 0
    if not (hides_after or hides_before):
        return None
    distance = torch.arange(span) - torch.arange(tokens)[:, None] - offset
    masked = torch.zeros(tokens, span, dtype=torch.bool)
    if after is not None and hides_after:
        masked |= distance > after
    if before is not None and hides_before:
        masked |= distance < -before
    return masked


class Paged:
    """Keys or values in blocks [blocks, size, KV, D], or [blocks, KV, size, D] (`heads_first`)."""

    def __init__(self, cache: Tensor, blocks: Sequence[Sequence[int]], lengths: Sequence[int], heads_first: bool):
        self.cache, self.blocks, self.lengths, self.heads_first = cache, blocks, lengths, heads_first

    def __getitem__(self, index: int) -> Tensor:
        """Return the rows [S, KV, D] of sequence `index`."""
        found = self.cache[torch.tensor(self.blocks[index], dtype=torch.long)]
        if self.heads_first:
            found = found.transpose(1, 2)
        return found.flatten(0, 1)[: self.lengths[index]]


class Packed:
    """Keys or values of all sequences in one tensor [T, KV, D], split at cumulative `ends`."""

    def __init__(self, rows: Tensor, ends: Sequence[int]):
        self.rows, self.ends = rows, ends

    def __getitem__(self, index: int) -> Tensor:
        """Return the rows [S, KV, D] of sequence `index`."""
        start = self.ends[index - 1] if index else 0
        return self.rows[start : self.ends[index]]


class Padded:
    """Keys or values in a padded batch [B, S, KV, D] of which each sequence uses its first `lengths`."""

    def __init__(self, rows: Tensor, lengths: Sequence[int]):
        self.rows, self.lengths = rows, lengths

    def __getitem__(self, index: int) -> Tensor:
        """Return the rows [S, KV, D] of sequence `index`."""
        return self.rows[index, : self.lengths[index]]


Store = Paged | Packed | Padded
