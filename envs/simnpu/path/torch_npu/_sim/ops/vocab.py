"""Operators at the vocabulary's end of a model: sharded embedding and the filter of the sampler."""

from __future__ import annotations

import torch

from .. import checks
from ..registry import operator

Tensor = torch.Tensor


@operator("_C_ascend::get_masked_input_and_mask", source="vllm-ascend csrc, get_masked_input_and_mask")
def get_masked_input_and_mask(
    input: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Map token ids to rows of one shard of the embedding; return (rows, mask of the ids outside the shard).

    The shard holds the ids of the original vocabulary [org start, org end), `num_org_vocab_padding` padding
    rows and the ids [added start, added end). Ids outside are mapped to row 0. `input` int32 or int64 of any
    shape.
    """
    name = "_C_ascend::get_masked_input_and_mask"
    checks.dtype(name, "input", input, checks.INDICES)
    pairs = (
        ("org_vocab", org_vocab_start_index, org_vocab_end_index),
        ("added_vocab", added_vocab_start_index, added_vocab_end_index),
    )
    for prefix, start, end in pairs:
        if start < 0 or end < start:
            checks.fail(name, f"{prefix}_start_index, {prefix}_end_index", f"{start}, {end}", "0 <= start <= end")
    if num_org_vocab_padding < 0:
        checks.fail(name, "num_org_vocab_padding", num_org_vocab_padding, "a number >= 0")
    original = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    first_added_row = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = torch.where(original, input - org_vocab_start_index, torch.zeros_like(input))
    rows = torch.where(added & ~original, input - added_vocab_start_index + first_added_row, rows)
    return rows, ~(original | added)


@operator("npu::npu_top_k_top_p", source="op-plugin docs, npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Return `logits` [B, V] with all but the top-k and of those all but the top-p probabilities set to -inf.

    k int32 [B], 1 to V (V itself: no limit); p [B] in the dtype of `logits`, 0 to 1; either may be None. A
    row keeps at least one element. Ties with the k-th largest are kept.
    """
    name = "npu::npu_top_k_top_p"
    checks.dtype(name, "logits", logits, checks.FLOATS)
    checks.rank(name, "logits", logits, (2,))
    batch, vocabulary = logits.shape
    ordered, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        checks.dtype(name, "k", k, (torch.int32,))
        checks.exact_shape(name, "k", k, (batch,), "one number for each row of logits")
        if batch and not bool(((k >= 1) & (k <= vocabulary)).all()):
            checks.fail(name, "k", k.tolist(), f"1 to {vocabulary}")
        threshold = ordered.gather(1, vocabulary - k.long()[:, None])
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if p is not None:
        checks.same_dtype(name, "p", p, "logits", logits)
        checks.exact_shape(name, "p", p, (batch,), "one number for each row of logits")
        if batch and not bool(((p >= 0) & (p <= 1)).all()):
            checks.fail(name, "p", p.tolist(), "0 to 1")
        dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p.float()[:, None]
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered).to(logits.dtype)
