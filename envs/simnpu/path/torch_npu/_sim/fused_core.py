"""Checks, layouts, masks and lengths that the fused attention operators of CANN share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import checks
from .attention_core import Packed, Padded, Paged, Store, attend, band
from .checks import IntList

Tensor = torch.Tensor

UNLIMITED = 2147483647
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_UNSIMULATED_LAYOUTS = (
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND_NTD",
    "NTD_TND",
    "NTD",
    "BSH_BNSD",
    "BSND_BNSD",
)


@dataclass(frozen=True)
class Names:
    """What one operator calls the arguments that all of them share, for messages."""

    operator: str
    heads: str = "num_heads"
    scale: str = "scale"
    query_lengths: str = "actual_seq_lengths"
    kv_lengths: str = "actual_seq_lengths_kv"


@dataclass(frozen=True)
class Request:
    """The arguments that the operators share, still unchecked."""

    layout: str
    num_heads: int
    num_kv_heads: int
    scale: float
    mask: Tensor | None
    query_lengths: IntList | None
    kv_lengths: IntList | None
    block_table: Tensor | None
    block_size: int
    sparse_mode: int
    before: int
    after: int
    want_total: bool = False
    sink: Tensor | None = None


def _split(names: Names, argument: str, tensor: Tensor, layout: str, heads: int) -> Tensor:
    """View `tensor` as [B, S, heads, D] (or [T, heads, D] for TND) and check heads and D."""
    op = names.operator
    checks.rank(op, argument, tensor, (4,) if layout in ("BSND", "BNSD", "BNSD_BSND") else (3,))
    if layout == "BSH":
        if tensor.shape[2] % heads:
            checks.fail(op, argument, checks.shape(tensor), f"[batch, tokens, heads * dim] with {heads} heads")
        tensor = tensor.view(*tensor.shape[:2], heads, -1)
    elif layout.startswith("BNSD"):
        tensor = tensor.transpose(1, 2)
    if tensor.shape[-2] != heads:
        checks.fail(op, argument, f"of {tensor.shape[-2]} heads in layout {layout}", f"{heads} heads")
    checks.head_dim(op, argument, tensor.shape[-1])
    return tensor


def _per_sequence(op: str, argument: str, values: IntList, batch: int, shared: bool = True) -> list[int]:
    """Read lengths of a padded or paged batch: at least one for each sequence, or (`shared`) one for all."""
    lengths = checks.host_integers(op, argument, values)
    if shared and len(lengths) == 1:
        return lengths * batch
    if len(lengths) < batch:
        accepted = f"one length for each of {batch} sequences" + (", or 1 for all" if shared else "")
        checks.fail(op, argument, f"{len(lengths)} long", accepted)
    return lengths[:batch]


def _query_lengths(names: Names, request: Request, query: Tensor) -> list[int]:
    """Return how many queries each sequence has."""
    op, argument = names.operator, names.query_lengths
    if request.layout == "TND":
        if request.query_lengths is None:
            checks.fail(op, argument, None, "cumulative lengths, which layout TND needs")
        ends = checks.host_integers(op, argument, request.query_lengths)
        checks.cumulative_lengths(op, argument, ends, query.shape[0], "query")
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
    batch, tokens = query.shape[:2]
    if request.query_lengths is None:
        return [tokens] * batch
    lengths = _per_sequence(op, argument, request.query_lengths, batch)
    checks.raw_lengths(op, argument, lengths, 0, tokens, "the tokens of a sequence in query")
    return lengths


def _stores(
    names: Names,
    request: Request,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_heads: int,
    lengths: list[int],
) -> tuple[list[int], Store, Store]:
    """Return the number of keys of each sequence, and where to read keys and values."""
    op, argument = names.operator, names.kv_lengths
    checks.exact_shape(op, "value", value, key.shape, "the shape of key")
    for name, tensor in (("key", key), ("value", value)):
        checks.same_dtype(op, name, tensor, "query", query)
    if request.block_table is not None:
        return _paged_stores(names, request, query, key, value, kv_heads, lengths)
    keys = _split(names, "key", key, request.layout, kv_heads)
    values = _split(names, "value", value, request.layout, kv_heads)
    _same_width(op, keys, query)
    if request.layout == "TND":
        if request.kv_lengths is None:
            checks.fail(op, argument, None, "cumulative lengths, which layout TND needs")
        ends = checks.host_integers(op, argument, request.kv_lengths)
        checks.cumulative_lengths(op, argument, ends, key.shape[0], "key")
        if len(ends) != len(lengths):
            checks.fail(op, argument, f"{len(ends)} long", f"{len(lengths)} ends, as many as {names.query_lengths}")
        spans = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return spans, Packed(keys, ends), Packed(values, ends)
    if keys.shape[0] != query.shape[0]:
        checks.fail(op, "key", f"a batch of {keys.shape[0]}", f"a batch of {query.shape[0]}, that of query")
    batch, tokens = keys.shape[:2]
    if request.kv_lengths is None:
        spans = [tokens] * batch
    else:
        spans = _per_sequence(op, argument, request.kv_lengths, batch)
        checks.raw_lengths(op, argument, spans, 0, tokens, "the tokens of a sequence in key")
    return spans, Padded(keys, spans), Padded(values, spans)


def _paged_stores(
    names: Names,
    request: Request,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_heads: int,
    lengths: list[int],
) -> tuple[list[int], Store, Store]:
    """`_stores` with a block table: [blocks, block size, heads * D] or [blocks, heads, block size, D]."""
    op, argument, size = names.operator, names.kv_lengths, request.block_size
    assert request.block_table is not None
    if request.layout == "TND":
        checks.block_size(op, "block_size", size, 16, 1024)
    elif query.shape[1] > 1:
        checks.block_size(op, "block_size", size, 128, 512)
    else:
        checks.block_size(op, "block_size", size, 16, 512)
    heads_first = key.dim() == 4 and request.layout in ("BNSD", "BNSD_BSND", "TND")
    if heads_first:
        expected: tuple[int, ...] = (key.shape[0], kv_heads, size, key.shape[3])
        checks.exact_shape(op, "key", key, expected, "blocks, heads, block_size, dim")
        caches = key, value
    else:
        checks.rank(op, "key", key, (3,))
        expected = (key.shape[0], size, kv_heads * query.shape[-1])
        checks.exact_shape(op, "key", key, expected, "blocks, block_size, heads * dim of query")
        caches = key.view(*key.shape[:2], kv_heads, -1), value.view(*value.shape[:2], kv_heads, -1)
    _same_width(op, caches[0], query)
    if request.kv_lengths is None:
        checks.fail(op, argument, None, "one length for each sequence, which a block_table needs")
    spans = _per_sequence(op, argument, request.kv_lengths, len(lengths), request.layout != "TND")
    checks.raw_lengths(op, argument, spans, 0, key.shape[0] * size, "the tokens that the cache holds")
    needed = checks.block_table(op, "block_table", request.block_table, spans, size, key.shape[0])
    return spans, Paged(caches[0], needed, spans, heads_first), Paged(caches[1], needed, spans, heads_first)


def _same_width(op: str, keys: Tensor, query: Tensor) -> None:
    if keys.shape[-1] != query.shape[-1]:
        checks.fail(op, "key", f"head_dim {keys.shape[-1]}", f"head_dim {query.shape[-1]}, that of query")


def _full_mask(names: Names, request: Request, query: Tensor, span: int) -> Tensor:
    """Check the mask of sparse modes 0 and 1 and view it as bool [B or 1, Q_S, KV_S]."""
    op, mask = names.operator, request.mask
    assert mask is not None
    if request.layout == "TND":
        checks.unsimulated(op, f"atten_mask with sparse_mode={request.sparse_mode} in layout TND")
    checks.dtype(op, "atten_mask", mask, checks.MASKS)
    batch, tokens = query.shape[:2]
    if request.block_table is not None:
        span = request.block_table.shape[1] * request.block_size
    if mask.dim() == 2 and tokens == 1:
        found = mask[:, None]
    elif mask.dim() == 4 and mask.shape[1] == 1:
        found = mask[:, 0]
    else:
        found = mask if mask.dim() == 3 else mask[None]
    if found.dim() != 3 or found.shape[0] not in (1, batch) or found.shape[1] < tokens or found.shape[2] < span:
        spelt = f"({batch}, {span})" if tokens == 1 else f"({tokens}, {span})"
        accepted = f"{spelt}, (1, {tokens}, {span}), ({batch}, 1, {tokens}, {span}) or larger in the last axes"
        checks.fail(op, "atten_mask", checks.shape(mask), accepted)
    return found.bool()


def _masks(names: Names, request: Request, query: Tensor, lengths: list[int], spans: list[int]) -> list[Tensor | None]:
    """Return for each sequence the mask [T, S], true where a query must not look, or None."""
    op, mode = names.operator, request.sparse_mode
    checks.choice(op, "sparse_mode", mode, (0, 1, 2, 3, 4))
    single = request.layout != "TND" and query.shape[1] == 1
    if mode >= 2 and (request.mask is not None or not single):
        checks.causal_template(op, "atten_mask", request.mask, mode)
    if mode == 1 and request.mask is None:
        checks.fail(op, "atten_mask", None, "a full mask, which sparse_mode=1 needs")
    if mode < 2 and request.mask is None:
        return [None] * len(lengths)
    full = _full_mask(names, request, query, max(spans, default=0)) if mode < 2 else None
    found: list[Tensor | None] = []
    for index, (tokens, span) in enumerate(zip(lengths, spans, strict=True)):
        masked: Tensor | None = None
        if single:
            pass  # As documented: a single query is bound by neither sparse_mode, pre_tokens nor next_tokens.
        elif mode == 0:
            masked = band(tokens, span, _limit(request.before), _limit(request.after), 0)
        elif mode == 2:
            masked = band(tokens, span, None, 0, 0)
        elif mode == 3:
            masked = band(tokens, span, None, 0, span - tokens)
        elif mode == 4:
            masked = band(tokens, span, _limit(request.before), _limit(request.after), span - tokens)
        if full is not None:
            given = full[index if full.shape[0] > 1 else 0, :tokens, :span]
            masked = given if masked is None else masked | given
        found.append(masked)
    return found


def _limit(tokens: int) -> int | None:
    return None if tokens >= UNLIMITED else tokens


def fused_attention(names: Names, request: Request, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Check everything, attend sequence by sequence, and return (output, log-sum-exp or [0])."""
    op = names.operator
    if request.layout in _UNSIMULATED_LAYOUTS:
        checks.unsimulated(op, f"input_layout={request.layout!r}")
    checks.choice(op, "input_layout", request.layout, LAYOUTS)
    checks.dtype(op, "query", query, checks.HALVES)
    checks.scale(op, names.scale, request.scale)
    kv_heads = checks.heads(op, names.heads, request.num_heads, "num_key_value_heads", request.num_kv_heads)
    queries = _split(names, "query", query, request.layout, request.num_heads)
    lengths = _query_lengths(names, request, queries)
    spans, keys, values = _stores(names, request, queries, key, value, kv_heads, lengths)
    masks = _masks(names, request, queries, lengths, spans)
    if request.sink is not None:
        if request.layout != "TND":
            checks.fail(op, "learnable_sink", f"given in layout {request.layout}", "a sink in layout TND only")
        checks.same_dtype(op, "learnable_sink", request.sink, "query", query)
        checks.exact_shape(op, "learnable_sink", request.sink, (request.num_heads,), "one number for each query head")
    packed = request.layout == "TND"
    output = query.new_zeros(queries.shape)
    total = torch.full(queries.shape[:-1], torch.inf)
    start = 0
    for index, tokens in enumerate(lengths):
        here = slice(start, start + tokens) if packed else (index, slice(0, tokens))
        sequence = (queries[here], keys[index], values[index], request.scale, masks[index], request.sink)
        output[here], sums = attend(*sequence, request.want_total)
        if sums is not None:
            total[here] = sums
        start += tokens
    if request.layout == "BNSD":
        output = output.transpose(1, 2).contiguous()
    elif request.layout == "BSH":
        output = output.flatten(2)
    if not request.want_total:
        return output, torch.zeros(1)
    return output, (total if packed else total.transpose(1, 2).contiguous())[..., None]


def refuse(names: Names, what: str, given: dict[str, object]) -> None:
    """Refuse documented arguments that the simulation leaves out, if any differs from its neutral value."""
    for argument, value in given.items():
        if value is not None and (isinstance(value, (Tensor, list, tuple)) or value != 0):
            checks.unsimulated(names.operator, f"argument {argument} ({what})")
