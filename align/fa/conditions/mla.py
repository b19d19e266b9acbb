"""Latent attention."""

from __future__ import annotations

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.text import short
from align.fa.view import LATENT, View

ROPE_DIM = 64
QUERY_DIMS = (LATENT, 128)
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_LAYOUTS = {
    512: ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD"),
    128: ("BSH", "BSND", "TND", "BNSD", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND", "NTD_TND"),
}


def pair(view: View) -> Outcome:
    one, other = view.passed("query_rope"), view.passed("key_rope")
    if not one and not other:
        return ABSENT
    if one == other:
        return HOLDS
    given, missing = ("query_rope", "key_rope") if one else ("key_rope", "query_rope")
    return fires(given=given, missing=missing)


def _roped(view: View) -> bool:
    return view.passed("query_rope") and view.passed("key_rope")


def rope_dim(view: View) -> Outcome:
    if not _roped(view):
        return ABSENT
    wrong = [(name, one.shape[-1] if one.shape else 0) for name in ("query_rope", "key_rope")
             if (one := view.tensor(name)) is not None and _rope_width(view, name) != ROPE_DIM]  # fmt: skip
    return fires(name=wrong[0][0], dim=wrong[0][1]) if wrong else HOLDS


def _rope_width(view: View, name: str) -> int | None:
    """Of one head; in layouts with all heads in one axis the width is divided."""
    one = view.tensor(name)
    if one is None or not one.shape:
        return None
    heads = view.heads if name == "query_rope" else view.kv_heads
    joint = "H" in view.axes and (name == "query_rope" or not view.paged) and len(one.shape) == 3
    if joint and view.passed("heads") and heads and one.shape[-1] % heads == 0:
        return one.shape[-1] // heads
    if name == "key_rope" and view.paged and len(one.shape) == 3 and heads:
        return one.shape[-1] // heads
    return one.shape[-1]


def query_dim(view: View) -> Outcome:
    if not _roped(view):
        return ABSENT
    if view.head_dim is None:
        return unknown("the head dimension")
    return fires_if(view.head_dim not in QUERY_DIMS, dim=view.head_dim)


def mode(view: View) -> Outcome:
    if not _roped(view) or view.head_dim != LATENT:
        return ABSENT
    allowed = (0, 3, 4, 9) if view.operator.version == "v2" else (0, 3, 4)
    return fires_if(view.mode not in allowed, mode=view.mode, allowed=", ".join(map(str, allowed)))


def rope_shape(view: View) -> Outcome:
    """The other axes are those of what it belongs to."""
    if not _roped(view):
        return ABSENT
    for name, owner in (("query_rope", view.query), ("key_rope", view.key)):
        one = view.tensor(name)
        if one is not None and owner is not None and one.shape[:-1] != owner.shape[:-1]:
            return fires(name=name, shape=short(one), owner=short(owner))
    return HOLDS


def rope_dtype(view: View) -> Outcome:
    if not _roped(view):
        return ABSENT
    for name, owner in (("query_rope", view.query), ("key_rope", view.key)):
        one = view.tensor(name)
        if one is not None and owner is not None and owner.dtype != "int8" and one.dtype != owner.dtype:
            return fires(name=name, dtype=one.dtype, owner=owner.dtype)
    return HOLDS


def one_kv_head(view: View) -> Outcome:
    if not _roped(view) or view.head_dim != LATENT or view.kv_heads is None:
        return ABSENT
    return fires_if(view.kv_heads != 1, heads=view.kv_heads, name=view.name("kv_heads"))


def head_count(view: View) -> Outcome:
    if not _roped(view) or view.head_dim != LATENT or view.heads is None:
        return ABSENT
    return fires_if(view.heads not in _HEADS, heads=view.heads)


def layout(view: View) -> Outcome:
    allowed = _LAYOUTS.get(view.head_dim or 0) if _roped(view) else None
    if allowed is None:
        return ABSENT
    return fires_if(view.layout not in allowed, layout=view.layout, dim=view.head_dim, allowed=", ".join(allowed))


def total(view: View) -> Outcome:
    if not _roped(view) or view.head_dim != LATENT:
        return ABSENT
    return fires_if(view.partial, name=view.name("lse"))


def latent_twice(view: View) -> Outcome:
    """Keys and values are one latent cache."""
    if not view.absorbed or view.key is None or view.value is None:
        return ABSENT
    if view.key.memory is None or view.value.memory is None:
        return unknown("where key and value lie in memory")
    return fires_if(view.key.memory != view.value.memory)


def value_width(view: View) -> Outcome:
    """``mla_vheadsize``: how much of the latent cache is the value."""
    width = view.whole("mla_vheadsize")
    if width is None:
        return ABSENT
    most = view.key.shape[-1] if view.key is not None and view.key.shape else LATENT + ROPE_DIM
    return fires_if(not 0 < width <= most, width=width, most=most)


def value_latent(view: View) -> Outcome:
    width = view.whole("mla_vheadsize")
    if width is None or view.key is None or view.key.shape[-1:] != (LATENT + ROPE_DIM,):
        return ABSENT
    return fires_if(width != LATENT, width=width)


def fits(view: View) -> Outcome:
    """Both there, of the right widths; said as OK."""
    right = _roped(view) and view.head_dim in QUERY_DIMS
    right = right and all(_rope_width(view, name) == ROPE_DIM for name in ("query_rope", "key_rope"))
    return fires(dim=view.head_dim) if right else ABSENT
