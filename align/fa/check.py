"""All rules over one call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from align.fa.call import Call, Context
from align.fa.describe import Describer
from align.fa.outcome import LANGUAGES, SEVERITIES, Finding, Report
from align.fa.rules import Rule, rules_for
from align.fa.view import View

_OWN = ("phase", "layer", "path")


def check_call(call: Call, families: Collection[str] = ()) -> Report:
    """What the rules say of a described call.

    Args:
        call: from :func:`align.fa.describe`, :func:`align.fa.read_call`, or made by hand.
        families: of :data:`align.fa.rules.FAMILIES`; all if none is named.

    Raises:
        ValueError: an operator that is not known.
    """
    view = View(call)
    findings, held, open_ = [], [], {}
    for one in rules_for(view.operator.name):
        if families and one.family not in families:
            continue
        outcome = one.look(view)
        if outcome.kind == "fires":
            findings.append(_finding(one, outcome.facts))
        elif outcome.kind == "holds":
            held.append(one.id)
        elif outcome.kind == "unknown":
            open_[one.id] = str(outcome.facts["what"])
    findings.sort(key=lambda found: SEVERITIES.index(found.severity))
    return Report(call, tuple(findings), tuple(held), open_)


def _finding(one: Rule, facts: Any) -> Finding:
    shown = {name: _shown(value) for name, value in facts.items()}
    said = {language: getattr(one, language).format(**shown) for language in LANGUAGES}
    return Finding(one.id, one.severity, said, facts)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        cut = [str(one) for one in value[:8]] + ["…"] * (len(value) > 8)
        return f"[{', '.join(cut)}]"
    if isinstance(value, float):
        short = f"{value:.6g}"
        return f"{short}.0" if short.lstrip("-").isdigit() else short
    return str(value)


class Checker:
    """Checks many calls cheaply: masks are looked at once, and calls that differ in the layer alone are judged once.

    For a worker that checks every call of a run: :meth:`check` before the operator runs, so that a finding survives a
    raise.
    """

    def __init__(self, finite: bool = False, content: bool = True) -> None:
        self._describer = Describer(finite, content)
        self._known: dict[Any, Report] = {}

    def check(self, operator: Any, *args: Any, context: Context | None = None, **kwargs: Any) -> Report:
        """What the rules say of ``operator(*args, **kwargs)``; ``report.call`` is this call's own description.

        Raises:
            ValueError: as :meth:`align.fa.describe.Describer.describe`.
        """
        call = self._describer.describe(operator, args, kwargs, context)
        key = call.key()
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            found = self._known[key] = check_call(call)
        return (
            found
            if found.call.context.layer == call.context.layer
            else Report(call, found.findings, found.held, found.unknown)
        )


def check_attention(operator: Any, *args: Any, context: Context | None = None, **kwargs: Any) -> Report:
    """Check one call before it is made.

    ``check_attention("npu_fused_infer_attention_score", q, k, v, phase="decode", …)`` needs no more than torch.

    Args:
        operator: name or function of an attention or cache operator, in any spelling.
        args, kwargs: as the operator gets them. Three names more say what the arguments do not: ``phase``
            (``prefill``, ``decode``, ``mixed``), ``layer`` and ``path`` (:data:`align.fa.PATHS`).
        context: the same and more, such as the scale that the model's configuration asks for.

    Returns:
        Findings, the worst first; ``report.ok`` is false if one is an ERROR.

    Raises:
        ValueError: an operator, phase or path that is not known.
    """
    own = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
    if own:
        base = context or Context()
        known = {name: getattr(base, name) for name in base.__dataclass_fields__}
        context = Context(**{**known, **own})
    return check_call(Describer(finite=True).describe(operator, args, kwargs, context))
