"""The calls of one side against the rules: what was broken, by which operator, where, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from align.attention.model import Model
from align.attention.tables import rows_of
from align.fa.call import Call, TensorFacts
from align.fa.check import check_call
from align.fa.files import Records, Seen, Step
from align.fa.outcome import SEVERITIES, Finding, Report
from align.fa.text import short

#: Why there is nothing to judge.
NO_RECORDS = "no call was recorded: by --no-fa, or by a version that did not record them"
#: Values of an argument that a description shows.
_SHOWN = 16


@dataclass(frozen=True)
class Group:
    """All calls of one operator in one phase that break one rule.

    Attributes:
        rule, severity: of the rule.
        said: language → sentence, with the values of the first call.
        facts: the values in it.
        first: the step in which the first one was made, in time.
        layer: of the first call in it.
        layers, ranks, runs: of all of them.
        steps: how many steps made such calls.
        calls: how many there were, one for each layer.
        variants: how many different sentences they give.
        at: call site of the first, ``file:line function``, innermost first.
        arguments: of the first call, as text.
        known: language → why a warning is harmless here; empty if it is not known to be.
    """

    rule: str
    severity: str
    operator: str
    phase: str
    said: Mapping[str, str]
    facts: Mapping[str, Any]
    first: Step
    layer: int
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    runs: tuple[int, ...]
    steps: int
    calls: int
    variants: int
    at: tuple[str, ...]
    arguments: Mapping[str, str]
    known: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "operator": self.operator,
            "phase": self.phase,
            "said": dict(self.said),
            "step": self.first.step,
            "run": self.first.run,
            "rank": self.first.rank,
            "layer": self.layer,
            "layers": list(self.layers),
            "ranks": list(self.ranks),
            "steps": self.steps,
            "calls": self.calls,
            "variants": self.variants,
            "at": list(self.at),
            "arguments": dict(self.arguments),
            "known": dict(self.known),
        }


@dataclass(frozen=True)
class Looked:
    """Which rules were looked at for one operator in one phase, whatever came of it; ``unseen`` ones could not be.

    ``calls`` counts layers, steps, runs and ranks.
    """

    operator: str
    phase: str
    calls: int
    rules: tuple[str, ...]
    unseen: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "operator": self.operator,
            "phase": self.phase,
            "calls": self.calls,
            "rules": list(self.rules),
            "unseen": list(self.unseen),
        }


@dataclass(frozen=True)
class Audited:
    """The calls of one side.

    Attributes:
        observable: whether any were recorded.
        calls: how many were made, in all layers, steps, runs and ranks.
        distinct: how many of them differ by more than their layer.
        operators: how many calls of each.
        phases: in which calls were seen.
        groups: broken rules, the worst severity first, then in time. Without rules that say that all is right.
        held: how many rules were looked at and hold, of all calls.
        unknown: rule → what would have to be known.
        unseen: what could not be described or judged, and why; never a pass.
        looked: by operator and phase, which rules were looked at.
    """

    observable: bool
    calls: int = 0
    distinct: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    held: int = 0
    unknown: Mapping[str, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    bytes: int = 0
    looked: tuple[Looked, ...] = ()

    def of(self, severity: str) -> tuple[Group, ...]:
        return tuple(one for one in self.groups if one.severity == severity)

    @property
    def errors(self) -> tuple[Group, ...]:
        return self.of("ERROR")

    def also_unseen(self, why: str) -> Audited:
        """With one more thing that could not be judged."""
        return replace(self, unseen=(*self.unseen, why))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "observable": self.observable,
            "calls": self.calls,
            "distinct": self.distinct,
            "operators": dict(self.operators),
            "phases": list(self.phases),
            "groups": [one.to_dict() for one in self.groups],
            "held": self.held,
            "not_observable": dict(self.unknown),
            "unseen": list(self.unseen),
            "bytes": self.bytes,
            "looked": [one.to_dict() for one in self.looked],
        }


def not_audited(why: str) -> Audited:
    """A side whose calls nobody looked at."""
    return Audited(False, unseen=(why,))


def audit_side(records: Records, model: Model, engine: str = "") -> Audited:
    """Judge the records of all runs of one launch.

    Args:
        engine: whose warnings are looked up among those that are known to be harmless.
    """
    judged: dict[Any, Report | str] = {}
    operators: Counter[str] = Counter()
    held: set[str] = set()
    unknown: dict[str, str] = {}
    looked: dict[tuple[str, str], tuple[Counter[str], set[str], set[str]]] = {}
    unseen = [f"{operator}: {why}" for operator, why in records.failures.items()]
    broken: dict[tuple[str, str, str], list[tuple[Seen, tuple[int, ...], Report, Finding]]] = {}
    for seen in records.seen:
        call = records.calls[seen.call]
        operators[call.operator] += len(seen.layers)
        for layers, report in _reports(seen, call, model, judged):
            if isinstance(report, str):
                unseen.append(report)
                continue
            counts, rules, open_ = looked.setdefault((call.operator, seen.step.phase), (Counter(), set(), set()))
            counts["calls"] += len(layers)
            rules |= {*report.held, *(one.rule for one in report.findings)}
            open_ |= set(report.unknown)
            held |= set(report.held)
            unknown.update(report.unknown)
            for found in report.findings:
                if found.severity != "OK":
                    key = (found.rule, call.operator, seen.step.phase)
                    broken.setdefault(key, []).append((seen, layers, report, found))
    groups = [_group(key, group, engine) for key, group in broken.items()]
    groups.sort(key=lambda one: (SEVERITIES.index(one.severity), one.first.run, one.first.step, one.layer))
    names = {one.rule for one in groups}
    return Audited(
        observable=bool(records.seen),
        calls=sum(operators.values()),
        distinct=len(judged),
        operators=dict(operators),
        phases=tuple(dict.fromkeys(seen.step.phase for seen in records.seen)),
        groups=tuple(groups),
        held=len(held - names),
        unknown={rule: what for rule, what in sorted(unknown.items()) if rule not in held | names},
        unseen=tuple(dict.fromkeys(unseen)) or (() if records.seen else ("no call was seen",)),
        bytes=records.bytes,
        looked=tuple(
            Looked(operator, phase, counts["calls"], tuple(sorted(rules)), tuple(sorted(open_ - rules)))
            for (operator, phase), (counts, rules, open_) in looked.items()
        ),
    )


def _reports(
    seen: Seen, call: Call, model: Model, judged: dict[Any, Report | str]
) -> Iterator[tuple[tuple[int, ...], Report | str]]:
    """What the rules say, for the layers of each window; a call that cannot be judged says why."""
    windows: dict[int | None, list[int]] = {}
    for layer in seen.layers:
        windows.setdefault(model.window(layer), []).append(layer)
    for window, layers in windows.items():
        context = model.context(seen.step, window)
        key = (seen.call, context)
        if key not in judged:
            try:
                judged[key] = check_call(Call(call.operator, call.arguments, context))
            except Exception as error:
                judged[key] = f"{call.operator}: not judged: {type(error).__name__}: {error}"
        yield tuple(layers), judged[key]


def _group(key: tuple[str, str, str], group: list[tuple[Seen, tuple[int, ...], Report, Finding]], engine: str) -> Group:
    rule, operator, phase = key
    seen, layers, report, found = min(group, key=lambda one: (one[0].step.run, one[0].step.step, min(one[1])))
    steps = {one.step for one, *_ in group}
    return Group(
        rule=rule,
        severity=found.severity,
        operator=operator,
        phase=phase,
        said=found.said,
        facts=found.facts,
        first=seen.step,
        layer=min(layers),
        layers=tuple(sorted({layer for _, some, *_ in group for layer in some})),
        ranks=tuple(sorted({step.rank for step in steps})),
        runs=tuple(sorted({step.run for step in steps})),
        steps=len({(step.run, step.step) for step in steps}),
        calls=sum(len(some) for _, some, *_ in group),
        variants=len({one.said["en"] for *_, one in group}),
        at=seen.at,
        arguments=described(report.call),
        known=known_harmless(rule, engine, operator) if found.severity != "ERROR" else {},
    )


def described(call: Call) -> dict[str, str]:
    """The arguments as text: ``int32[3] = [2, 5, 8]``."""
    return {name: _text(value) for name, value in call.arguments.items()}


def _text(value: Any) -> str:
    if isinstance(value, TensorFacts):
        if value.mask is not None:
            return f"{short(value)}, hides: {value.mask.pattern}"
        return short(value) if value.values is None else f"{short(value)} = {_listed(value.values)}"
    return _listed(value) if isinstance(value, tuple) else str(value)


def _listed(values: tuple[Any, ...]) -> str:
    cut = [_text(one) for one in values[:_SHOWN]] + [f"… ({len(values)})"] * (len(values) > _SHOWN)
    return f"[{', '.join(cut)}]"


def known_harmless(rule: str, engine: str, operator: str) -> dict[str, str]:
    """Why a warning is harmless for an engine's operator, by language (``harmless.tsv``); empty if nobody knows."""
    for row in rows_of("harmless.tsv"):
        if row["rule"] == rule and row["engine"] in ("", engine) and row["operator"] in ("", operator):
            return {"en": row["en"], "zh": row["zh"]}
    return {}
