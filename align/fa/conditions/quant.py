"""Quantised keys and values."""

from __future__ import annotations

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if
from align.fa.view import View

#: Version → names of scales, offsets and modes of keys and of values.
_SPLIT = {
    "v1": ("antiquant_scale", "antiquant_offset", "antiquant_mode"),
    "v2": ("dequant_scale", "dequant_offset", "quant_mode"),
}


def _name(view: View, part: int, side: str) -> str:
    """``key_antiquant_scale`` of version 1, ``dequant_scale_key`` of version 2, ``key_quant_mode`` of both kinds."""
    word = _SPLIT[view.operator.version][part]
    return f"{word}_{side}" if view.operator.version == "v2" and part < 2 else f"{side}_{word}"


def _given(view: View, name: str) -> bool:
    return view.call.arguments.get(name) is not None


def _quantised(view: View) -> bool:
    return view.key is not None and view.key.dtype in ("int8", "int32")


def scale_missing(view: View) -> Outcome:
    if not _quantised(view) or view.key is None:
        return ABSENT
    names = [_name(view, 0, "key")] + (["antiquant_scale"] if view.operator.version == "v1" else [])
    return fires_if(not any(_given(view, name) for name in names), dtype=view.key.dtype, name=names[0])


def scale_unused(view: View) -> Outcome:
    if view.key is None or _quantised(view):
        return ABSENT
    names = [_name(view, 0, side) for side in ("key", "value")]
    names += ["antiquant_scale"] if view.operator.version == "v1" else []
    found = [name for name in names if _given(view, name)]
    return fires_if(bool(found), name=", ".join(found), dtype=view.key.dtype)


def _pair(view: View, one: str, other: str) -> Outcome:
    given = (_given(view, one), _given(view, other))
    if not any(given):
        return ABSENT
    return HOLDS if all(given) else fires(given=one if given[0] else other, missing=other if given[0] else one)


def scale_pair(view: View) -> Outcome:
    return _pair(view, _name(view, 0, "key"), _name(view, 0, "value"))


def offset_pair(view: View) -> Outcome:
    return _pair(view, _name(view, 1, "key"), _name(view, 1, "value"))


def prefix_pair(view: View) -> Outcome:
    return _pair(view, "key_shared_prefix", "value_shared_prefix")


def _modes(view: View) -> tuple[int, int]:
    key, value = (view.whole(_name(view, 2, side)) for side in ("key", "value"))
    return key or 0, value or 0


def mode_equal(view: View) -> Outcome:
    if not _quantised(view):
        return ABSENT
    key, value = _modes(view)
    return fires_if(key != value and (key, value) != (0, 1), key=key, value=value)


def mode_known(view: View) -> Outcome:
    wrong = [one for one in _modes(view) if one not in range(6)]
    return fires(mode=wrong[0]) if wrong else HOLDS if _quantised(view) else ABSENT


def mode_many(view: View) -> Outcome:
    """More than one query: per channel and per token alone."""
    if not _quantised(view) or view.single is not False or view.packed:
        return ABSENT
    wrong = [one for one in _modes(view) if one not in (0, 1)]
    return fires(mode=wrong[0]) if wrong else HOLDS


def joint_mode(view: View) -> Outcome:
    mode = view.whole("antiquant_mode")
    return ABSENT if mode is None else fires_if(mode not in (0, 1), mode=mode)


def joint_and_split(view: View) -> Outcome:
    if not _given(view, "antiquant_scale"):
        return ABSENT
    return fires_if(_given(view, "key_antiquant_scale"))


def dim_align(view: View) -> Outcome:
    if view.key is None or view.key.dtype != "int8" or view.head_dim is None:
        return ABSENT
    return fires_if(bool(view.head_dim % 32), dim=view.head_dim)


def out_offset(view: View) -> Outcome:
    offset, scale = ("quant_offset2", "quant_scale2") if view.operator.version != "v2" else (
        "quant_offset_out", "quant_scale_out")  # fmt: skip
    return ABSENT if not _given(view, offset) else fires_if(not _given(view, scale), offset=offset, scale=scale)
