"""The attention calls of both sides beside each other: the same layer and phase, argument by argument.

What is compared is what the arguments mean: two operators, or two layouts, may say the same in other words. Such
differences are named from ``benign.tsv``; all others are ``different``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from align.attention.model import Model
from align.attention.tables import rows_of
from align.fa.call import Call, TensorFacts
from align.fa.conditions.mask import tokens_see
from align.fa.files import Records, Seen, Step
from align.fa.operators import ATTENTION, operators
from align.fa.text import short
from align.fa.view import View

EQUAL, BENIGN, DIFFERENT, UNKNOWN = "equal", "benign", "different", "not observable"
#: Scales that differ less are one number in float32 (2⁻²³, twice).
_CLOSE = 2.5e-7
_SHOWN = 8


@dataclass(frozen=True)
class Row:
    """One argument of both calls.

    Attributes:
        name: what it is, whatever the operators call it.
        candidate, reference: as passed; empty if it was not, or there is no such.
        verdict: ``equal``, ``benign``, ``different`` or ``not observable``.
        why: of ``benign`` the id of a row of ``benign.tsv``.
    """

    name: str
    candidate: str
    reference: str
    verdict: str
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, with the reason in both languages."""
        known = next((row for row in rows_of("benign.tsv") if row["id"] == self.why), None)
        reason = {} if known is None else {"en": known["en"], "zh": known["zh"]}
        return {
            "name": self.name,
            "candidate": self.candidate,
            "reference": self.reference,
            "verdict": self.verdict,
            "why": self.why,
            "reason": reason,
        }


@dataclass(frozen=True)
class Beside:
    """One pair of calls; it stands for all ``layers`` in which the comparison says the same.

    Attributes:
        steps: of each side, in the run that both are compared in.
    """

    phase: str
    layers: tuple[int, ...]
    steps: Mapping[str, int]
    rows: tuple[Row, ...]

    @property
    def different(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == DIFFERENT)

    def to_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "layers": list(self.layers),
            "steps": dict(self.steps),
            "rows": [row.to_dict() for row in self.rows],
        }


# ------------------------------------------------------------------------------------------------------------ pairs


def beside(records: Mapping[str, Records], models: Mapping[str, Model]) -> tuple[Beside, ...]:
    """Of each phase the first step that computes the same rows on both sides, in the last run that has such.

    Args:
        records: by role, of both sides.
        models: of each side, in its layout.
    """
    if set(records) != {"candidate", "reference"}:
        return ()
    steps = {role: _steps(one) for role, one in records.items()}
    found: list[Beside] = []
    for phase in ("prefill", "decode", "mixed"):
        pair = _first_pair(steps["candidate"], steps["reference"], phase)
        if pair is not None:
            found += _of_steps(phase, dict(zip(("candidate", "reference"), pair, strict=True)), records, models)
    return tuple(found)


def _steps(records: Records) -> dict[Step, list[Seen]]:
    """Attention calls of the first rank, by step."""
    found: dict[Step, list[Seen]] = {}
    for seen in records.seen:
        family = operators()[records.calls[seen.call].operator].family
        if family in ATTENTION and seen.step.rank == records.ranks[0]:
            found.setdefault(seen.step, []).append(seen)
    return found


def _first_pair(candidate: Mapping[Step, Any], reference: Mapping[Step, Any], phase: str) -> tuple[Step, Step] | None:
    def by_rows(steps: Mapping[Step, Any], run: int) -> dict[Any, Step]:
        own = [step for step in steps if step.run == run and step.phase == phase]
        return {frozenset(step.rows): step for step in reversed(own)}

    for run in sorted({step.run for step in candidate} & {step.run for step in reference}, reverse=True):
        mine, theirs = by_rows(candidate, run), by_rows(reference, run)
        both = [mine[rows] for rows in mine if rows in theirs]
        if both:
            first = min(both, key=lambda step: step.step)
            return first, theirs[frozenset(first.rows)]
    return None


def _of_steps(
    phase: str, pair: Mapping[str, Step], records: Mapping[str, Records], models: Mapping[str, Model]
) -> list[Beside]:
    layers: dict[str, dict[int, Call]] = {}
    for role, step in pair.items():
        layers[role] = {}
        for seen in _steps(records[role])[step]:
            call = records[role].calls[seen.call]
            for layer in seen.layers:
                context = models[role].context(step, models[role].window(layer))
                layers[role].setdefault(layer, Call(call.operator, call.arguments, context))
    groups: dict[tuple[Row, ...], list[int]] = {}
    for layer in sorted(set(layers["candidate"]) & set(layers["reference"])):
        rows = compare(layers["candidate"][layer], layers["reference"][layer])
        groups.setdefault(rows, []).append(layer)
    steps = {role: step.step for role, step in pair.items()}
    return [Beside(phase, tuple(group), steps, rows) for rows, group in groups.items()]


# -------------------------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class _Argument:
    """What a call says of one thing: as text, and what that means; a meaning of ``None`` is not known."""

    text: str
    meaning: Any


def compare(candidate: Call, reference: Call) -> tuple[Row, ...]:
    """All arguments that either call has."""
    mine, theirs = View(candidate), View(reference)
    order = _order(mine, theirs)
    rows = []
    for name, (get, why) in _ARGUMENTS.items():
        one, other = get(mine, None), get(theirs, order)
        if one.text or other.text:
            rows.append(_row(name, one, other, why(mine, theirs)))
    return tuple(rows)


def _row(name: str, one: _Argument, other: _Argument, why: str) -> Row:
    if one.text == other.text:
        return Row(name, one.text, other.text, EQUAL)
    if one.meaning is None or other.meaning is None:
        return Row(name, one.text, other.text, UNKNOWN)
    same = one.meaning == other.meaning
    if isinstance(one.meaning, float) and isinstance(other.meaning, float):
        same = abs(one.meaning - other.meaning) <= _CLOSE * max(abs(one.meaning), abs(other.meaning))
    return Row(name, one.text, other.text, BENIGN if same else DIFFERENT, why if same else "")


def _order(mine: View, theirs: View) -> Sequence[int] | None:
    """Where each sequence of the candidate is in the reference's batch, as the steps' lengths say; equal orders and
    unknown ones give ``None``."""
    first = list(zip(mine.context.q_lens or (), mine.context.kv_lens or (), strict=False))
    second = list(zip(theirs.context.q_lens or (), theirs.context.kv_lens or (), strict=False))
    if first == second or sorted(first) != sorted(second):
        return None
    places = dict(enumerate(second))
    order = []
    for pair in first:
        at = next(place for place, one in places.items() if one == pair)
        places.pop(at)
        order.append(at)
    return order


def _lengths(role: str) -> Callable[[View, Sequence[int] | None], _Argument]:
    def get(view: View, order: Sequence[int] | None) -> _Argument:
        each = _queries(view) if role == "q_lengths" else _keys(view)
        count = len(view.context.q_lens or ()) or None
        meaning = None if each is None else tuple(each[:count])
        if meaning is not None and order is not None and max(order) < len(meaning):
            meaning = tuple(meaning[at] for at in order)
        return _Argument(_shown(view.get(role)), meaning)

    return get


def _queries(view: View) -> tuple[int, ...] | None:
    """Of each sequence; of tokens that are handed over as sequences of their own those of the step."""
    return view.context.q_lens if view.token_rows else view.q_each


def _keys(view: View) -> tuple[int, ...] | None:
    each, known, counts = view.kv_each, view.context.kv_lens, view.context.q_lens
    if each is None or known is None or counts is None or not view.token_rows:
        return each
    repeated = tuple(one for one, count in zip(known, counts, strict=True) for _ in range(count))
    return known if each == repeated else each


def _sees(view: View) -> Any:
    """What each query sees, as far as it is known: ``causal``, or what the mask and the mode say."""
    if view.token_rows and view.masking is not None and view.mode == 0:
        return "causal" if view.masking.visible == tokens_see(view) else view.masking.visible
    if view.single and view.mask is None and view.mode in (None, 0):
        return "causal"  # one query, the last: it sees all keys
    if view.operator.family == "atb_paged" and not view.passed("mask"):
        return "causal"
    pattern = None if view.masking is None else view.masking.pattern
    if view.mode in (2, 3):
        fits = view.mode == 3 or view.q_each == view.kv_each
        return "causal" if pattern == "causal" and fits else None if pattern is None else (view.mode, pattern)
    if view.mode == 4:
        return ("window", view.whole("before"), view.whole("after"))
    if view.mask is None:
        return "all"
    if pattern in ("causal", "causal right"):
        fits = pattern == "causal right" or view.q_each == view.kv_each
        return "causal" if fits else (view.mode, pattern)
    return None if pattern is None else pattern


def _mask(view: View, order: Sequence[int] | None) -> _Argument:
    facts = view.mask
    text = "" if facts is None else short(facts) + (f", {facts.mask.pattern}" if facts.mask is not None else "")
    return _Argument(text, _sees(view))


def _whole_heads(role: str) -> Callable[[View, Sequence[int] | None], _Argument]:
    def get(view: View, order: Sequence[int] | None) -> _Argument:
        value = view.heads if role == "heads" else view.kv_heads
        if value is None:
            return _Argument("", None)
        ranks, whole = view.context.ranks or 1, view.context.heads if role == "heads" else view.context.kv_heads
        # Key heads are repeated where there are more ranks than heads.
        total = whole if role == "kv_heads" and whole is not None and whole < ranks and value == 1 else value * ranks
        return _Argument(str(value), total)

    return get


def _blocks(view: View, order: Sequence[int] | None) -> _Argument:
    if view.table is None:
        # Without a history nothing has to be read from the cache.
        fresh = view.kv_each is not None and view.kv_each == view.q_each
        return _Argument("", "fresh" if fresh else "cache")
    used = view.used_rows()
    right = used is not None and all(block >= 0 for row in used for block in row)
    fresh = view.kv_each is not None and view.kv_each == view.q_each
    return _Argument(short(view.table), ("fresh" if fresh else "cache") if right else None)


def _plain(
    role: str, meaning: Callable[[View], Any] | None = None
) -> Callable[[View, Sequence[int] | None], _Argument]:
    def get(view: View, order: Sequence[int] | None) -> _Argument:
        value = view.get(role) if view.has(role) else None
        return _Argument(_shown(value), value if meaning is None else meaning(view))

    return get


def _no_effect(view: View) -> Any:
    """In bfloat16 there is one precision; the second bit is about rows that are hidden whole."""
    inner = view.whole("inner") or 0
    return inner & 2 if view.query is not None and view.query.dtype == "bfloat16" else inner


def _tokens(view: View, order: Sequence[int] | None) -> _Argument:
    each = _queries(view)
    text = "" if view.query is None else short(view.query)
    return _Argument(text, None if each is None or view.query is None else (sum(each), view.query.dtype))


def _paged_keys(view: View, order: Sequence[int] | None) -> _Argument:
    return _Argument("" if view.key is None else short(view.key), None if view.key is None else view.key.dtype)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, TensorFacts):
        value = value.values if value.values is not None else short(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value[:_SHOWN]))}{f', … ({len(value)})' if len(value) > _SHOWN else ''}]"
    return str(value)


def _always(why: str) -> Callable[[View, View], str]:
    return lambda mine, theirs: why


def _or_missing(role: str, why: str) -> Callable[[View, View], str]:
    """``no_such`` where one operator has no such argument, ``implied`` where one call leaves it out."""

    def name(mine: View, theirs: View) -> str:
        if not (mine.has(role) and theirs.has(role)):
            return "no_such"
        if role.endswith("lengths") and mine.token_rows != theirs.token_rows:
            return "token_rows"
        return why if mine.passed(role) and theirs.passed(role) else "implied"

    return name


def _of_table(mine: View, theirs: View) -> str:
    if not (mine.paged and theirs.paged):
        return "paged"
    return "token_rows" if mine.token_rows != theirs.token_rows else "blocks"


_Get = Callable[[View, "Sequence[int] | None"], _Argument]
#: What is compared, in the order of the table.
_ARGUMENTS: Mapping[str, tuple[_Get, Callable[[View, View], str]]] = {
    "operator": (lambda view, order: _Argument(view.operator.name, "attention"), _always("operator")),
    "layout": (lambda view, order: _Argument(view.layout, _queries(view)), _always("layout")),
    "query": (_tokens, _always("layout")),
    "key": (_paged_keys, lambda mine, theirs: "view" if mine.paged and theirs.paged else "paged"),
    "heads": (_whole_heads("heads"), _always("split")),
    "kv_heads": (_whole_heads("kv_heads"), _always("split")),
    "head_dim": (lambda view, order: _Argument(_shown(view.head_dim), view.head_dim), _always("layout")),
    "scale": (_plain("scale", lambda view: view.number("scale")), _always("rounding")),
    "sparse_mode": (_plain("mode", _sees), _or_missing("mode", "mode")),
    "pre_tokens": (_plain("before", lambda view: view.whole("before") if view.mode == 4 else ""), _always("no_such")),
    "next_tokens": (_plain("after", lambda view: view.whole("after") if view.mode == 4 else ""), _always("no_such")),
    "mask": (_mask, _or_missing("mask", "mask")),
    "q_lengths": (_lengths("q_lengths"), _or_missing("q_lengths", "cumulative")),
    "kv_lengths": (_lengths("kv_lengths"), _or_missing("kv_lengths", "cumulative")),
    "block_table": (_blocks, lambda mine, theirs: _of_table(mine, theirs)),
    "block_size": (_plain("block_size", lambda view: ""), _or_missing("block_size", "block_size")),
    "inner_precise": (_plain("inner", _no_effect), _or_missing("inner", "no_effect")),
}
