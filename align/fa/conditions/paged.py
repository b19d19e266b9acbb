"""Block tables and paged caches."""

from __future__ import annotations

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.text import short
from align.fa.view import View


def table_dtype(view: View) -> Outcome:
    return ABSENT if view.table is None else fires_if(view.table.dtype != "int32", dtype=view.table.dtype)


def table_rows(view: View) -> Outcome:
    if view.table is None or len(view.table.shape) != 2 or view.batch is None:
        return ABSENT
    return fires_if(view.table.shape[0] < view.batch, rows=view.table.shape[0], batch=view.batch)


def table_rows_more(view: View) -> Outcome:
    if view.table is None or len(view.table.shape) != 2 or view.batch is None:
        return ABSENT
    return fires_if(view.table.shape[0] > view.batch, rows=view.table.shape[0], batch=view.batch)


def table_range(view: View) -> Outcome:
    if view.table is None or view.key is None or not view.key.shape:
        return ABSENT
    used = view.used_rows()
    if used is None:
        return unknown("block table and key lengths")
    blocks = view.key.shape[0]
    wrong = [(i, one) for i, row in enumerate(used) for one in row if not 0 <= one < blocks]
    return fires(row=wrong[0][0], block=wrong[0][1], blocks=blocks) if wrong else HOLDS


def table_repeat(view: View) -> Outcome:
    if view.table is None:
        return ABSENT
    used = view.used_rows()
    if used is None:
        return unknown("block table and key lengths")
    twice = [(i, one) for i, row in enumerate(used) for one in row if row.count(one) > 1]
    return fires(row=twice[0][0], block=twice[0][1]) if twice else HOLDS


def table_shared(view: View) -> Outcome:
    used = view.used_rows() if view.table is not None else None
    if used is None:
        return ABSENT
    seen: dict[int, int] = {}
    for i, row in enumerate(used):
        for one in row:
            if seen.setdefault(one, i) != i:
                return fires(block=one, first=seen[one], second=i)
    return HOLDS


def block_missing(view: View) -> Outcome:
    if not view.paged or not view.has("block_size"):
        return ABSENT
    return fires_if(not view.whole("block_size"))


def block_of_cache(view: View) -> Outcome:
    """The block axis of ``[blocks, size, H]`` or ``[blocks, heads, size, dim]``."""
    size = view.whole("block_size")
    if not view.paged or not size or view.key is None or len(view.key.shape) not in (3, 4):
        return ABSENT
    if len(view.key.shape) == 4 and _unviewed(view):
        return ABSENT  # cache_view says more
    axis = 1 if len(view.key.shape) == 3 else 2
    return fires_if(view.key.shape[axis] != size, size=size, cache=short(view.key))


def block_align(view: View) -> Outcome:
    if not view.paged or not view.block:
        return ABSENT
    return fires_if(bool(view.block % 16), size=view.block)


def block_range(view: View) -> Outcome:
    """Documents differ: 512 at most, 1024 for packed and latent queries."""
    if not view.paged or not view.block:
        return ABSENT
    most = 1024 if view.packed or view.has_rope else 512
    return fires_if(view.block > most, size=view.block, most=most)


def block_prefill(view: View) -> Outcome:
    """Padded layouts with more than one query."""
    if not view.paged or not view.block or view.packed or view.has_rope or view.single is not False:
        return ABSENT
    return fires_if(bool(view.block % 128), size=view.block)


def block_unused(view: View) -> Outcome:
    return fires_if(bool(view.whole("block_size"))) if view.has("block_size") and not view.paged else ABSENT


def _unviewed(view: View) -> bool:
    """``[blocks, size, heads, dim]``, as engines keep a cache."""
    if view.key is None or len(view.key.shape) != 4:
        return False
    _, second, third, _ = view.key.shape
    size = view.whole("block_size")
    return second == size and third == view.kv_heads and second != third


def cache_view(view: View) -> Outcome:
    if not view.paged or view.key is None:
        return ABSENT
    return fires_if(_unviewed(view), cache=short(view.key))


def cache_heads_first(view: View) -> Outcome:
    if not view.paged or view.key is None:
        return ABSENT
    return fires_if(len(view.key.shape) == 4 and not _unviewed(view), cache=short(view.key), layout=view.layout)


def cache_width(view: View) -> Outcome:
    """``H`` of ``[blocks, size, H]``."""
    if not view.paged or view.key is None or len(view.key.shape) != 3 or view.head_dim is None or not view.kv_heads:
        return ABSENT
    if view.key.dtype == "int32":  # eight int4 in one
        return ABSENT
    wanted = view.kv_heads * view.head_dim
    return fires_if(view.key.shape[2] != wanted, width=view.key.shape[2], wanted=wanted, heads=view.kv_heads)


def cache_wide(view: View) -> Outcome:
    if not view.paged or view.key is None or len(view.key.shape) != 3:
        return ABSENT
    return fires_if(view.key.shape[2] > 65535, width=view.key.shape[2])


def atb_cache(view: View) -> Outcome:
    """``[blocks, size, heads, dim]``."""
    if view.key is None or not view.kv_heads:
        return ABSENT
    right = len(view.key.shape) == 4 and view.key.shape[2] == view.kv_heads
    return fires_if(not right, cache=short(view.key), heads=view.kv_heads)


def atb_dim(view: View) -> Outcome:
    if view.key is None or len(view.key.shape) != 4 or view.head_dim is None:
        return ABSENT
    return fires_if(view.key.shape[3] != view.head_dim, cache=view.key.shape[3], query=view.head_dim)
