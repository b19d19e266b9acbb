"""Writes into the cache."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from align.fa.call import TensorFacts
from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.text import short
from align.fa.view import View

_CACHES = ("key_cache", "value_cache")
#: Layout → axis of the tokens in a contiguous cache.
TOKEN_AXIS = {"BSH": 1, "BSND": 1, "BNSD": 2, "TND": 0}
_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
_SIZES = {"kv": 576, "gamma": 512, "cos": 64, "sin": 64}


def _pairs(view: View) -> list[tuple[str, TensorFacts, str, TensorFacts]]:
    """Rows with the cache that they go to."""
    found = []
    for rows, cache in zip(("key", "value"), _CACHES, strict=False):
        one, other = view.tensor(rows), view.tensor(cache)
        if one is not None and other is not None:
            found.append((rows, one, cache, other))
    return found


def _plain(rows: TensorFacts, cache: TensorFacts) -> bool:
    """``[blocks, size, heads, dim]``."""
    return len(rows.shape) == 3 and len(cache.shape) == 4 and cache.shape[2:] == rows.shape[1:]


def _fractal(rows: TensorFacts, cache: TensorFacts) -> bool:
    """NZ: ``[blocks, heads * dim / c, size, c]``, where c is 16, or 32 for int8."""
    width = 32 if rows.dtype == "int8" else 16
    if len(rows.shape) != 3 or len(cache.shape) != 4 or cache.shape[3] != width:
        return False
    return cache.shape[1] * width == rows.shape[1] * rows.shape[2]


def _mode(view: View) -> str:
    return str(view.get("cache_mode") or "Norm")


def mode_known(view: View) -> Outcome:
    return fires_if(_mode(view) not in ("Norm", "PA_NZ"), mode=_mode(view))


def mode_nz(view: View) -> Outcome:
    """``PA_NZ``, which is also the default, for a cache that is not NZ."""
    if _mode(view) != "PA_NZ":
        return ABSENT
    for _, rows, name, cache in _pairs(view):
        if cache.format == "ND" or (not cache.format and _plain(rows, cache) and not _fractal(rows, cache)):
            said = "passed" if view.passed("cache_mode") else "left out"
            return fires(name=name, cache=short(cache), said=said)
    return HOLDS


def mode_plain(view: View) -> Outcome:
    if _mode(view) != "Norm":
        return ABSENT
    for _, rows, name, cache in _pairs(view):
        if cache.format == "NZ" or (not cache.format and _fractal(rows, cache) and not _plain(rows, cache)):
            return fires(name=name, cache=short(cache))
    return HOLDS


def dtype(view: View) -> Outcome:
    for rows_name, rows, name, cache in _pairs(view):
        if rows.dtype != cache.dtype:
            return fires(name=name, dtype=cache.dtype, rows=rows_name, wanted=rows.dtype)
    return HOLDS


def rows_shape(view: View) -> Outcome:
    """Keys and values are of the same tokens and heads."""
    if view.key is None or view.value is None:
        return ABSENT
    shared = 3 if len(view.key.shape) == 4 else 2
    same = view.key.shape[:shared] == view.value.shape[:shared]
    return fires_if(not same, key=short(view.key), value=short(view.value))


def cache_shape(view: View) -> Outcome:
    if _mode(view) == "PA_NZ" and view.has("cache_mode"):
        return ABSENT
    for _, rows, name, cache in _pairs(view):
        if len(rows.shape) == 3 and not _plain(rows, cache) and not _fractal(rows, cache):
            return fires(name=name, cache=short(cache), rows=short(rows))
    return HOLDS


def _slots(view: View) -> TensorFacts | None:
    return view.tensor("slots")


def slot_dtype(view: View) -> Outcome:
    slots = _slots(view)
    if slots is None:
        return ABSENT
    allowed = {"write": ("int32", "int64"), "fused_write": ("int64",)}.get(view.operator.family, ("int32", "int64"))
    if view.operator.name.startswith("_npu_reshape"):
        allowed = ("int32",)
    return fires_if(
        slots.dtype not in allowed, name=view.name("slots"), dtype=slots.dtype, allowed=" or ".join(allowed)
    )


def slot_count(view: View) -> Outcome:
    slots = _slots(view)
    if slots is None or view.key is None or len(view.key.shape) != 3:
        return ABSENT
    return fires_if(
        slots.shape != view.key.shape[:1], name=view.name("slots"), shape=short(slots), tokens=view.key.shape[0]
    )


def _capacity(view: View) -> int | None:
    """Slots of the smallest cache."""
    pairs = _pairs(view)
    sizes = [cache.shape[0] * cache.shape[2 if _fractal(rows, cache) and not _plain(rows, cache) else 1]
             for _, rows, _, cache in pairs if len(cache.shape) == 4]  # fmt: skip
    return min(sizes) if sizes else None


def slot_range(view: View) -> Outcome:
    slots, capacity = _slots(view), _capacity(view)
    if slots is None or capacity is None:
        return ABSENT
    if slots.values is None and slots.high is None:
        return unknown(f"the values of {view.name('slots')}")
    low, high = _ends(slots)
    wrong = high if high >= capacity else low if low < -1 else None
    return fires_if(wrong is not None, name=view.name("slots"), slot=wrong, capacity=capacity)


def _ends(slots: TensorFacts) -> tuple[int, int]:
    if slots.values is not None:
        return min(slots.values, default=0), max(slots.values, default=0)
    return slots.low or 0, slots.high or 0


def slot_padding(view: View) -> Outcome:
    slots = _slots(view)
    if slots is None or (slots.values is None and slots.low is None):
        return ABSENT
    return fires_if(_ends(slots)[0] == -1, name=view.name("slots"))


def slot_repeat(view: View) -> Outcome:
    slots = _slots(view)
    if slots is None:
        return ABSENT
    if slots.values is None:
        return unknown(f"the values of {view.name('slots')}")
    real = sorted(one for one in slots.values if one >= 0)
    twice = [one for one, after in pairwise(real) if one == after]
    return fires(name=view.name("slots"), slot=twice[0]) if twice else HOLDS


# ---------- scatter_update


def axis(view: View) -> Outcome:
    """BSH → 1, TND → 0; the layout is the caller's knowledge."""
    wanted, given = TOKEN_AXIS.get(view.layout_in), view.whole("axis")
    if given is None:
        return ABSENT
    if wanted is None:
        return unknown("the layout of the cache")
    data = view.tensor("input")
    if given < 0 and data is not None:
        given += len(data.shape)
    return fires_if(given != wanted, axis=given, layout=view.layout_in, wanted=wanted)


def scatter_rank(view: View) -> Outcome:
    data, updates = view.tensor("input"), view.tensor("updates")
    if data is None or updates is None:
        return ABSENT
    return fires_if(len(data.shape) != len(updates.shape), data=short(data), updates=short(updates))


def scatter_dtype(view: View) -> Outcome:
    data, updates = view.tensor("input"), view.tensor("updates")
    if data is None or updates is None:
        return ABSENT
    return fires_if(data.dtype != updates.dtype, data=data.dtype, updates=updates.dtype)


def scatter_range(view: View) -> Outcome:
    data, slots, given = view.tensor("input"), _slots(view), view.whole("axis")
    if data is None or slots is None or given is None or not -len(data.shape) <= given < len(data.shape):
        return ABSENT
    if slots.values is None and slots.high is None:
        return unknown("the values of indices")
    low, high = _ends(slots)
    size = data.shape[given]
    wrong = high if high >= size else low
    return fires_if(not 0 <= wrong < size, index=wrong, axis=given, size=size)


# ---------- scatter_nd


def nd_indices(view: View) -> Outcome:
    data, slots = view.tensor("input"), _slots(view)
    if data is None or slots is None:
        return ABSENT
    right = len(slots.shape) >= 2 and 1 <= slots.shape[-1] <= len(data.shape)
    return fires_if(not right, indices=short(slots), data=short(data))


def nd_shape(view: View) -> Outcome:
    data, slots, updates = view.tensor("input"), _slots(view), view.tensor("updates")
    if data is None or slots is None or updates is None or len(slots.shape) < 2:
        return ABSENT
    wanted = (*slots.shape[:-1], *data.shape[slots.shape[-1] :])
    return fires_if(updates.shape != wanted, updates=short(updates), wanted=wanted)


def _tuples(view: View) -> list[tuple[int, ...]] | None:
    slots = _slots(view)
    if slots is None or slots.values is None or len(slots.shape) < 2:
        return None
    depth = slots.shape[-1]
    if not depth:
        return []
    return [slots.values[i : i + depth] for i in range(0, len(slots.values), depth)]


def nd_range(view: View) -> Outcome:
    data, found = view.tensor("input"), _tuples(view)
    if data is None or _slots(view) is None:
        return ABSENT
    if found is None:
        return unknown("the values of indices")
    wrong = [one for one in found if any(not 0 <= i < size for i, size in zip(one, data.shape, strict=False))]
    return fires(index=wrong[0], data=short(data)) if wrong else HOLDS


def nd_repeat(view: View) -> Outcome:
    found = _tuples(view)
    if found is None:
        return ABSENT if _slots(view) is None else unknown("the values of indices")
    ordered = sorted(found)
    twice = [one for one, after in pairwise(ordered) if one == after]
    return fires(index=twice[0]) if twice else HOLDS


# ---------- npu_kv_rmsnorm_rope_cache


def fused_mode(view: View) -> Outcome:
    return fires_if(_mode(view) not in _MODES, mode=_mode(view), allowed=", ".join(_MODES))


def fused_sizes(view: View) -> Outcome:
    for name, size in _SIZES.items():
        one = view.tensor(name)
        if one is not None and (not one.shape or one.shape[-1] != size):
            return fires(name=name, shape=short(one), size=size)
    return HOLDS


def fused_cache(view: View) -> Outcome:
    """By ``cache_mode``: ``[batch, 1, length, D]``, or ``[blocks, size, 1, D]``."""
    kv = view.tensor("kv")
    for name, width in (("k_cache", 64), ("ckv_cache", 512)):
        one = view.tensor(name)
        if one is None or kv is None or len(kv.shape) != 4:
            continue
        right = len(one.shape) == 4 and one.shape[3] == width
        right = right and (one.shape[:2] == (kv.shape[0], 1) if _mode(view) == "Norm" else one.shape[2] == 1)
        if not right:
            return fires(name=name, cache=short(one), mode=_mode(view))
    return HOLDS


def fused_index(view: View) -> Outcome:
    kv, slots, cache = view.tensor("kv"), _slots(view), view.tensor("k_cache")
    if kv is None or slots is None or len(kv.shape) != 4:
        return ABSENT
    batch, _, length, _ = kv.shape
    if _mode(view) == "Norm":
        wanted: tuple[int, ...] = (batch, length)
    elif "BLK" in _mode(view):
        if cache is None or len(cache.shape) != 4:
            return ABSENT
        wanted = (batch * ceil(length / cache.shape[1]),)
    else:
        wanted = (batch * length,)
    return fires_if(slots.shape != wanted, shape=short(slots), wanted=wanted, mode=_mode(view))


def fused_epsilon(view: View) -> Outcome:
    given, wanted = view.number("epsilon"), view.context.eps
    if wanted is None or given is None:
        return ABSENT
    return fires_if(abs(given - wanted) > 1e-3 * wanted, given=given, wanted=wanted)


def fused_epsilon_omitted(view: View) -> Outcome:
    return fires_if("epsilon" not in view.call.arguments, default=view.get("epsilon"))


def fused_output(view: View) -> Outcome:
    return fires_if(_mode(view) == "Norm") if view.get("is_output_kv") is True else ABSENT


def fused_quant(view: View) -> Outcome:
    given = [view.passed(name) for name in ("k_rope_scale", "c_kv_scale")]
    if not any(given):
        return ABSENT
    return fires_if(not all(given), missing="c_kv_scale" if given[0] else "k_rope_scale")


def fused_offset(view: View) -> Outcome:
    found = [name for name in ("k_rope_offset", "c_kv_offset") if view.passed(name)]
    return fires_if(bool(found), names=", ".join(found))
