"""The rules, from their tables ``rules.<family>.tsv``.

Columns: ``id``; ``severity`` (:data:`align.fa.outcome.SEVERITIES`); ``condition``, a function of
:mod:`align.fa.conditions`; the scope, each empty for any and otherwise words of which one must fit: ``operators``
(names, families, ``v1``, ``v2``, ``fused``, ``attention``), ``layouts`` (input parts), ``phases``, ``paths``;
``source``; and the message in English and Chinese, with places for the facts that the condition found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from align.fa import conditions
from align.fa.operators import ATTENTION, FUSED, Operator, operators, rows_of
from align.fa.outcome import ABSENT, Outcome, unknown
from align.fa.view import View

#: In the order of the report: seed 001's F.3, F.1, F.4, F.5, F.6, F.2, then what the operators' documents add.
FAMILIES = ("version", "scale", "layout", "mask", "lengths", "paged", "precision", "mla", "tensors", "quant", "write")


@dataclass(frozen=True)
class Rule:
    """One rule. ``condition`` is the function; the rest as in the table."""

    id: str
    family: str
    severity: str
    condition: Callable[[View], Outcome]
    operators: tuple[str, ...]
    layouts: tuple[str, ...]
    phases: tuple[str, ...]
    paths: tuple[str, ...]
    source: str
    en: str
    zh: str

    def look(self, view: View) -> Outcome:
        """What the rule says of a call of one of its operators; a phase that the call does not tell is asked for."""
        if self.layouts and view.layout_in not in self.layouts:
            return ABSENT
        if self.paths and view.path not in self.paths:
            return ABSENT
        if self.phases and view.phase not in self.phases:
            return unknown("the phase of the step") if not view.phase else ABSENT
        return self.condition(view)

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of the operators that it is about."""
        return tuple(name for name, one in operators().items() if not self.operators or _fits(self.operators, one))


def _fits(words: tuple[str, ...], operator: Operator) -> bool:
    own = {operator.name, operator.family, operator.version}
    own |= {"attention"} if operator.family in ATTENTION else set()
    own |= {"fused"} if operator.family in FUSED else set()
    return any(word in own for word in words)


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, family by family."""
    found = []
    for family in FAMILIES:
        for row in rows_of(f"rules.{family}.tsv"):
            words = {name: tuple(row[name].split()) for name in ("operators", "layouts", "phases", "paths")}
            found.append(
                Rule(
                    id=row["id"],
                    family=family,
                    severity=row["severity"],
                    condition=conditions.named(row["condition"]),
                    operators=words["operators"],
                    layouts=words["layouts"],
                    phases=words["phases"],
                    paths=words["paths"],
                    source=row["source"],
                    en=row["en"],
                    zh=row["zh"],
                )
            )
    return tuple(found)


def references(family: str) -> tuple[str, ...]:
    """What to read about the rules of a family, beyond their sources: ``references.tsv``."""
    return tuple(row["where"] for row in rows_of("references.tsv") if row["family"] in ("", family))


@cache
def rules_for(operator: str) -> tuple[Rule, ...]:
    """Those that may be about an operator of this name."""
    return tuple(one for one in rules() if operator in one.covered)


def rule(name: str) -> Rule | None:
    """The rule of an id; ``None`` if there is none."""
    return next((one for one in rules() if one.id == name), None)
