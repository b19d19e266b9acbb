"""The softmax scale."""

from __future__ import annotations

from math import isfinite, sqrt

from align.fa.conditions.version import OLD_SCALE
from align.fa.outcome import ABSENT, HOLDS, Outcome, fires_if, unknown
from align.fa.view import LATENT, View

#: Scales that differ less are one number in float32.
CLOSE = 1e-5
#: Widths of a latent query without and with its rope part.
LATENTS = (LATENT, LATENT + 64)


def _passed(view: View) -> float | None:
    """The scale, whatever its name; ``None`` if it was left out."""
    named = view.call.arguments.get(view.name("scale"), view.call.arguments.get(OLD_SCALE))
    return float(named) if isinstance(named, (int, float)) and not isinstance(named, bool) else None


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


def one(view: View) -> Outcome:
    given = _passed(view)
    return ABSENT if given is None else fires_if(given == 1.0, name=view.name("scale"))


def number(view: View) -> Outcome:
    given = _passed(view)
    return ABSENT if given is None else fires_if(not isfinite(given) or given <= 0, given=given)


def model(view: View) -> Outcome:
    """Of the model's configuration, which the context knows; a scale that was left out is its default."""
    if view.context.scale is None:
        return ABSENT
    given = _passed(view)
    effective = given if given is not None else view.number("scale")
    if effective is None:
        return unknown("the scale")
    return fires_if(not _close(effective, view.context.scale), given=effective, wanted=view.context.scale)


def head_dim(view: View) -> Outcome:
    """Where nothing is known of the model: 1/sqrt(head_dim) of the tensors."""
    given = _passed(view)
    if given is None or given == 1.0 or view.context.scale is not None or view.path.startswith("mla"):
        return ABSENT
    dim = view.context.head_dim or view.head_dim
    if dim is None:
        return unknown("the head dimension")
    if view.operator.name == "_npu_paged_attention_mla" or dim in LATENTS:
        return ABSENT
    return fires_if(not _close(given, 1 / sqrt(dim)), given=given, dim=dim, wanted=1 / sqrt(dim))


def latent(view: View) -> Outcome:
    """Absorbed latent attention scores heads of the model, not of the latent."""
    given = _passed(view)
    if given is None or not (view.absorbed or view.operator.name == "_npu_paged_attention_mla"):
        return ABSENT
    found = [width for width in LATENTS if _close(given, 1 / sqrt(width))]
    return fires_if(bool(found), given=given, width=found[0]) if found else HOLDS
