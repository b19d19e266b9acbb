"""Layouts, ranks, heads."""

from __future__ import annotations

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.text import short
from align.fa.view import View

#: Layouts that the documents of each family name.
KNOWN = {
    "fia": (
        "BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD", "NTD_TND", "NTD",
        "BSH_BNSD", "BSND_BNSD",
    ),
    "pfa": ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"),
    "ifa": ("BSH", "BSND", "BNSD"),
    "training": ("BSH", "SBH", "BSND", "BNSD", "TND"),
}  # fmt: skip
#: Key and value may differ in the last axis in these pairs of latent prefill.
_VALUE_DIMS = ((192, 128),)


def known(view: View) -> Outcome:
    wanted = KNOWN.get(view.operator.family)
    if wanted is None:
        return ABSENT
    return fires_if(view.layout not in wanted, layout=view.layout, known=", ".join(wanted))


def query_rank(view: View) -> Outcome:
    if view.query is None or not view.axes:
        return ABSENT
    return fires_if(
        len(view.query.shape) != len(view.axes), layout=view.layout, axes=view.axes, shape=short(view.query)
    )


def kv_rank(view: View) -> Outcome:
    if view.paged or not view.axes or view.key is None or view.value is None:
        return ABSENT
    wrong = [name for name in ("key", "value") if len(getattr(view, name).shape) != len(view.axes)]
    if not wrong:
        return HOLDS
    return fires(name=wrong[0], layout=view.layout, axes=view.axes, shape=short(getattr(view, wrong[0])))


def query_heads(view: View) -> Outcome:
    size = view.axis(view.query, "N")
    if size is None or view.heads is None:
        return ABSENT
    return fires_if(size != view.heads, layout=view.layout, size=size, name=view.name("heads"), heads=view.heads)


def kv_heads(view: View) -> Outcome:
    size = view.axis(view.key, "N")
    if view.paged or size is None or view.kv_heads is None:
        return ABSENT
    return fires_if(
        size != view.kv_heads, layout=view.layout, size=size, name=view.name("kv_heads"), heads=view.kv_heads
    )


def joint_heads(view: View) -> Outcome:
    """``[B, S, H]``: all heads in one axis."""
    size = view.axis(view.query, "H")
    if size is None or not view.heads:
        return ABSENT
    if size % view.heads:
        return fires(size=size, heads=view.heads, name=view.name("heads"))
    keys = view.axis(view.key, "H")
    if keys is None or view.paged or not view.kv_heads or view.key is None or view.key.dtype == "int32":
        return HOLDS
    if not view.passed("heads"):
        return ABSENT
    wanted = view.kv_heads * (size // view.heads)
    return fires_if(keys != wanted, size=keys, heads=view.kv_heads, name=view.name("kv_heads"))


def head_dim(view: View) -> Outcome:
    """In BSH the head dimension is what the head count makes of H; the model says what it is."""
    if view.context.head_dim is None or view.path.startswith("mla") or view.axis(view.query, "H") is None:
        return ABSENT
    if view.head_dim is None:
        return unknown("the head dimension")
    return fires_if(view.head_dim != view.context.head_dim, dim=view.head_dim, wanted=view.context.head_dim)


def key_dim(view: View) -> Outcome:
    query, key = view.axis(view.query, "D"), view.axis(view.key, "D")
    if view.paged or query is None or key is None or view.key is None or view.key.dtype == "int32":
        return ABSENT
    return fires_if(query != key, query=query, key=key)


def group(view: View) -> Outcome:
    if not view.heads or not view.kv_heads:
        return ABSENT
    return fires_if(bool(view.heads % view.kv_heads), heads=view.heads, kv=view.kv_heads)


def group_limit(view: View) -> Outcome:
    if not view.heads or not view.kv_heads or view.absorbed:
        return ABSENT
    return fires_if(view.heads > 64 * view.kv_heads, heads=view.heads, kv=view.kv_heads)


def key_value(view: View) -> Outcome:
    if view.key is None or view.value is None:
        return ABSENT
    key, value = view.key.shape, view.value.shape
    same = key == value or (key[:-1] == value[:-1] and (*key[-1:], *value[-1:]) in _VALUE_DIMS)
    return fires_if(not same, key=short(view.key), value=short(view.value))


def batch(view: View) -> Outcome:
    queries, keys = view.axis(view.query, "B"), view.axis(view.key, "B")
    if view.paged or queries is None or keys is None:
        return ABSENT
    return fires_if(queries != keys, query=queries, key=keys)


def heads_of_rank(view: View) -> Outcome:
    """After the tensor-parallel split."""
    total, ranks = view.context.heads, view.context.ranks
    if total is None or ranks is None or view.heads is None:
        return ABSENT
    return fires_if(
        view.heads != total // ranks,
        name=view.name("heads"), given=view.heads, wanted=total // ranks, total=total, ranks=ranks,
    )  # fmt: skip


def kv_heads_of_rank(view: View) -> Outcome:
    """Ranks beyond the key heads repeat them: one each."""
    total, ranks = view.context.kv_heads, view.context.ranks
    if total is None or ranks is None or view.kv_heads is None or view.path.startswith("mla"):
        return ABSENT
    wanted = max(1, total // ranks)
    return fires_if(
        view.kv_heads != wanted,
        name=view.name("kv_heads"), given=view.kv_heads, wanted=wanted, total=total, ranks=ranks,
    )  # fmt: skip


def dim_limit(view: View) -> Outcome:
    if view.head_dim is None or view.operator.family == "training" or not view.attention:
        return ABSENT
    return fires_if(view.head_dim > 512, dim=view.head_dim)


def dim_align(view: View) -> Outcome:
    if view.head_dim is None or view.query is None or view.query.dtype not in ("float16", "bfloat16"):
        return ABSENT
    return fires_if(bool(view.head_dim % 16), dim=view.head_dim)


def packed_dim(view: View) -> Outcome:
    dim = view.axis(view.query, "D")
    if dim is None or view.has_rope:
        return ABSENT
    listed = dim in (128, 192) or (dim == 64 and view.heads == view.kv_heads)
    return fires_if(not listed, dim=dim)


def bnsd_bsnd(view: View) -> Outcome:
    size = view.axis(view.query, "S")
    return ABSENT if view.layout != "BNSD_BSND" or size is None else fires_if(size <= 1, size=size)


def nbsd(view: View) -> Outcome:
    size = view.axis(view.query, "S")
    return ABSENT if not view.layout.endswith("_NBSD") or size is None else fires_if(size > 16, size=size)


def paged(view: View) -> Outcome:
    return fires_if(view.paged) if view.has("table") else ABSENT


def paged_bnsd(view: View) -> Outcome:
    return fires_if(view.paged and not view.has_rope) if view.has("table") else ABSENT


def table_rank(view: View) -> Outcome:
    if view.table is None:
        return ABSENT
    return fires_if(len(view.table.shape) != 2, shape=short(view.table))


def fits(view: View) -> Outcome:
    """The query alone; said as OK."""
    if view.query is None or not view.axes or len(view.query.shape) != len(view.axes):
        return ABSENT
    if "N" in view.axes:
        right = view.axis(view.query, "N") == view.heads
    else:
        right = bool(view.heads) and view.query.shape[-1] % (view.heads or 1) == 0
    return fires(layout=view.layout, shape=short(view.query), heads=view.heads) if right else ABSENT
