"""``align fa rules``: the rules as a table; and one of them for ``align explain``."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.cli.explain_names import Told
from align.cli.output import columns, print_json
from align.errors import EXIT_ALIGNED, UserError
from align.fa import call_record, check_call, rules
from align.fa.examples import examples
from align.fa.operators import operators, resolve
from align.fa.outcome import LANGUAGES, SEVERITIES
from align.fa.rules import FAMILIES, Rule, references

_HEAD = {
    "en": ("rule", "severity", "about", "what it says", "source"),
    "zh": ("规则", "级别", "范围", "内容", "来源"),
}


def execute(operator: str | None, severity: str | None, family: str | None, language: str, json: bool) -> int:
    """Print the rules that fit, and how many there are.

    Raises:
        UserError: an operator, severity, family or language that there is not.
    """
    _one_of("language", language, LANGUAGES)
    wanted = None if severity is None else _one_of("severity", severity.upper(), SEVERITIES)
    group = None if family is None else _one_of("family", family.lower(), FAMILIES)
    name = None if operator is None else _operator(operator)
    found = [
        one
        for one in rules()
        if wanted in (None, one.severity) and group in (None, one.family) and (name is None or name in one.covered)
    ]
    if json:
        print_json({"language": language, "count": len(found), "rules": [record(one) for one in found]})
        return EXIT_ALIGNED
    rows = [(one.id, one.severity, about(one), getattr(one, language), one.source) for one in found]
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        print(columns([_HEAD[language], *rows]))
        return EXIT_ALIGNED
    table = Table(*_HEAD[language], box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print(Text(f"{len(found)} rules; align explain {found[0].id if found else 'fa.mask.missing'}", "dim"))
    return EXIT_ALIGNED


def about(one: Rule) -> str:
    """The scope in words: operators, layouts, phases and paths; empty for all."""
    parts = (one.operators, one.layouts, one.phases, one.paths)
    return "; ".join(" ".join(part) for part in parts if part)


def record(one: Rule) -> dict[str, Any]:
    """A rule with its examples, for JSON."""
    example = examples()[one.id]
    return {
        "id": one.id,
        "family": one.family,
        "severity": one.severity,
        "operators": list(one.covered),
        "layouts": list(one.layouts),
        "phases": list(one.phases),
        "paths": list(one.paths),
        "source": one.source,
        "read": list(references(one.family)),
        "en": one.en,
        "zh": one.zh,
        "example": {
            "change": example.change,
            "fails": call_record(example.fails),
            "passes": call_record(example.passes),
        },
    }


def told(name: str) -> Told | None:
    """A rule as ``align explain`` shows it; ``None`` if there is no such rule.

    Raises:
        UserError: the id of no rule, but much like one.
    """
    one = next((rule for rule in rules() if rule.id == name), None)
    if one is None:
        near = get_close_matches(name, [rule.id for rule in rules()], n=4, cutoff=0.6)
        if near:
            raise UserError(f"there is no rule {name}", f"closest: {', '.join(near)}; align fa rules lists them")
        return None
    example = examples()[one.id]
    said = next(found for found in check_call(example.fails).findings if found.rule == one.id).said
    return Told(
        one.id,
        f"[{one.severity}] {one.en}",
        (
            ("about", (about(one) or "every operator",)),
            ("operator", one.covered),
            ("message", (one.en, one.zh)),
            ("example", (f"{example.change} → {said['en']}", said["zh"])),
            ("source", (one.source,)),
            ("read", references(one.family)),
            ("next", (f"align fa rules --family {one.family}", "align fa check CALL.json")),
        ),
        (),
        {"name": one.id, "rule": record(one)},
    )


def _one_of(what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise UserError(f"there is no {what} {given!r}", f"use one of: {', '.join(known)}")
    return given


def _operator(name: str) -> str:
    try:
        return resolve(name).name
    except ValueError:
        near = get_close_matches(name, list(operators()), n=3, cutoff=0.4)
        raise UserError(
            f"no rule is about an operator {name!r}", f"there are {', '.join(near or operators())}"
        ) from None
