"""What holds of every tensor: presence, dtype, device, memory."""

from __future__ import annotations

from collections.abc import Iterator

from align.fa.call import TensorFacts
from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if
from align.fa.text import short
from align.fa.view import View, elements

FLOATS = ("float16", "bfloat16")
_FIRST = ("query", "key", "value", "query_rope", "key_rope")
#: Lengths may lie on the host: their type is a list of integers.
_HOST = ("q_lengths", "kv_lengths", "block_size")


def missing(view: View) -> Outcome:
    required = [one.name for one in view.operator.arguments.values() if one.required]
    lost = [name for name in required if view.call.arguments.get(name) is None]
    return fires_if(bool(lost), names=", ".join(lost), operator=view.operator.name)


def query_dtype(view: View) -> Outcome:
    if view.query is None:
        return ABSENT
    allowed = (*FLOATS, "float32") if view.operator.family == "training" else (*FLOATS, "int8")
    return fires_if(view.query.dtype not in allowed, dtype=view.query.dtype, allowed=", ".join(allowed))


def kv_dtype(view: View) -> Outcome:
    """A cache of the model's dtype; int8 and packed int4 are quantised, which other rules look at."""
    if view.query is None:
        return ABSENT
    for role in ("key", "value"):
        one = view.tensor(role)
        if one is not None and one.dtype not in (view.query.dtype, "int8", "int32"):
            return fires(name=view.name(role), dtype=one.dtype, query=view.query.dtype)
    return HOLDS if view.key is not None else ABSENT


def kv_same(view: View) -> Outcome:
    if view.key is None or view.value is None:
        return ABSENT
    return fires_if(view.key.dtype != view.value.dtype, key=view.key.dtype, value=view.value.dtype)


def model_dtype(view: View) -> Outcome:
    if not view.context.dtype or view.query is None or view.query.dtype == "int8":
        return ABSENT
    return fires_if(view.query.dtype != view.context.dtype, dtype=view.query.dtype, wanted=view.context.dtype)


def _on_device(view: View) -> Iterator[tuple[str, TensorFacts]]:
    host = {view.name(role) for role in _HOST}
    for name, value in view.call.arguments.items():
        if isinstance(value, TensorFacts) and name not in host and value.device:
            yield name, value


def device(view: View) -> Outcome:
    """The first tensor decides; the rest lie where it does."""
    tensors = list(_on_device(view))
    if not tensors:
        return ABSENT
    first, wanted = tensors[0][0], tensors[0][1].device
    for name, one in tensors:
        if one.device != wanted:
            return fires(name=name, device=one.device, first=first, wanted=wanted)
    return HOLDS


def device_wanted(view: View) -> Outcome:
    if not view.context.device:
        return ABSENT
    wrong = [(name, one.device) for name, one in _on_device(view) if one.device != view.context.device]
    return fires(name=wrong[0][0], device=wrong[0][1], wanted=view.context.device) if wrong else HOLDS


def contiguous(view: View) -> Outcome:
    found = [name for name in _FIRST if (one := view.tensor(name)) is not None and one.contiguous is False]
    return fires_if(bool(found), names=", ".join(found))


def nonfinite(view: View) -> Outcome:
    tensors = [(name, one) for name, one in view.call.arguments.items() if isinstance(one, TensorFacts)]
    looked = [(name, one.nonfinite) for name, one in tensors if one.nonfinite is not None]
    bad = [(name, count) for name, count in looked if count]
    if bad:
        return fires(name=bad[0][0], count=bad[0][1])
    return HOLDS if looked else ABSENT


def out_dtype(view: View) -> Outcome:
    out = view.tensor("out")
    if out is None or view.query is None:
        return ABSENT
    return fires_if(out.dtype != view.query.dtype, dtype=out.dtype, query=view.query.dtype)


def out_shape(view: View) -> Outcome:
    """Tokens, heads and the width of a value."""
    out, query = view.tensor("out"), view.query
    if out is None or query is None or not view.heads or view.head_dim is None:
        return ABSENT
    width = view.whole("mla_vheadsize") or _value_dim(view)
    if width is None:
        return ABSENT
    wanted = query.shape[0] * view.heads * width
    right = out.shape[:1] == query.shape[:1] and elements(out.shape) == wanted
    return fires_if(not right, out=short(out), tokens=query.shape[0], heads=view.heads, dim=width)


def _value_dim(view: View) -> int | None:
    value = view.value
    if value is None or not value.shape or not view.kv_heads:
        return None
    return value.shape[-1] if len(value.shape) != 2 else value.shape[-1] // view.kv_heads
