"""Names of the two versions of fused-infer attention, and arguments whose defaults are silent."""

from __future__ import annotations

from functools import cache

from align.fa.operators import operators
from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if
from align.fa.view import View

_FIA = {"v1": "npu_fused_infer_attention_score", "v2": "npu_fused_infer_attention_score_v2"}
#: What documents of torch_npu 6.0 call ``scale`` of version 1.
OLD_SCALE = "scale_value"


@cache
def only(version: str) -> frozenset[str]:
    """Names that only this version has."""
    other = "v1" if version == "v2" else "v2"
    return frozenset(operators()[_FIA[version]].arguments) - frozenset(operators()[_FIA[other]].arguments)


def v1_name_in_v2(view: View) -> Outcome:
    found = sorted(set(view.call.arguments) & only("v1"))
    return fires_if(bool(found), names=", ".join(found))


def v2_name_in_v1(view: View) -> Outcome:
    found = sorted(set(view.call.arguments) & only("v2"))
    return fires_if(bool(found), names=", ".join(found))


def unknown_name(view: View) -> Outcome:
    other = only("v2") if view.operator.version == "v1" else only("v1") if view.operator.version else frozenset()
    allowed = {OLD_SCALE} if view.operator.version == "v1" else set()
    strange = set(view.call.arguments) - set(view.operator.arguments) - other - allowed
    return fires_if(bool(strange), names=", ".join(sorted(strange)), operator=view.operator.name)


def old_scale_name(view: View) -> Outcome:
    return fires_if(OLD_SCALE in view.call.arguments)


def scale_omitted(view: View) -> Outcome:
    return _omitted(view, "scale")


def heads_omitted(view: View) -> Outcome:
    return _omitted(view, "heads")


def kv_heads_omitted(view: View) -> Outcome:
    """0 is right where queries and keys have equally many heads."""
    if not view.has("kv_heads") or view.operator.arguments[view.name("kv_heads")].required:
        return ABSENT
    if view.name("kv_heads") in view.call.arguments:
        return HOLDS
    rank = view.axis(view.key, "N")
    if view.paged or rank is None or view.heads is None:
        return ABSENT
    return fires_if(rank != view.heads, name=view.name("kv_heads"), heads=view.heads, key=rank)


def _omitted(view: View, role: str) -> Outcome:
    if not view.has(role) or view.operator.arguments[view.name(role)].required:
        return ABSENT
    if view.name(role) in view.call.arguments or (role == "scale" and OLD_SCALE in view.call.arguments):
        return HOLDS
    return fires(name=view.name(role), default=view.get(role))
