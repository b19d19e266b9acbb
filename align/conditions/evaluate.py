"""Judges every condition from what both sides observed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adapters.base import Observation, StepRecord
from align.case.capacity import capacity
from align.case.schema import Case
from align.checkpoints.table import Structure
from align.conditions import judge
from align.conditions.requested import requested
from align.conditions.table import CONFIG_OPTIONS, LAUNCH, RUN, TABLE, Row, Stage
from align.conditions.types import Condition, Verdict
from align.models.info import ModelInfo
from align.sentences import Said, raw, said, text_of

_NOTHING = "nothing of the kind"
#: Suffix of a fact that says which modules have another value than most.
UNLIKE = "_unlike"
#: Modules that are listed.
LISTED = 8


@dataclass(frozen=True)
class SideFacts:
    """What is known of one side.

    Attributes:
        engine: its name.
        observations: of the engine and of its workers, ranks merged; also the start and sampling facts of a run.
        steps: of the first run; empty before it.
        token_ids: prompt ids by request as the worker saw them, ``None`` for one that no step computed; ``None`` if
            nothing was recorded.
        files: SHA-256 by file name of the checkpoint this side read; ``None`` if not known.
        options: what the user set for this side's engine.
    """

    engine: str
    observations: Sequence[Observation] = ()
    steps: Sequence[StepRecord] = ()
    token_ids: Mapping[str, Sequence[int | None]] | None = None
    files: Mapping[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    _by_name: dict[str, Observation] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for observation in self.observations:  # a later one is newer
            self._by_name[observation.name] = observation

    def fact(self, name: str) -> Observation | None:
        return self._by_name.get(name)


@dataclass(frozen=True)
class _Side:
    """One condition on one side: value to show, where it was read, and the verdict."""

    value: Any
    where: str
    ok: bool | None
    why: Said


def evaluate(
    case: Case,
    info: ModelInfo,
    structure: Structure,
    sides: Mapping[str, SideFacts],
    *,
    stage: Stage = RUN,
    allow: Collection[str] = (),
) -> tuple[Condition, ...]:
    """All conditions that can be judged at ``stage``, in the table's order.

    Args:
        sides: by role; one side alone is judged against what is requested.
        stage: ``launch`` leaves out what only a run shows.
        allow: names of the conditions that the user goes on without.
    """
    cases = {role: case.at(role) for role in sides}
    wanted = {role: requested(one, info, structure) for role, one in (cases or {"candidate": case}).items()}
    names = next(iter(wanted.values())).keys()
    asked = {
        role for role, side in sides.items() if any(name.partition(".")[0] in CONFIG_OPTIONS for name in side.options)
    }
    found = []
    for row in TABLE:
        if row.name not in names or (row.stage == RUN and stage == LAUNCH):
            continue
        judged = {role: _one_side(row, wanted[role][row.name], side, cases[role]) for role, side in sides.items()}
        judged = _together(row, sides, judged)
        condition = _condition(row, _asked_of(row, wanted), judged, row.name in allow, asked)
        places = {role: _places(row, wanted[role][row.name], sides[role]) for role in condition.sides}
        found.append(replace(condition, places={role: names for role, names in places.items() if names}))
    return tuple(found)


def _asked_of(row: Row, wanted: Mapping[str, Mapping[str, Any]]) -> Any:
    """What was demanded, in short; by side, where the sides have layouts of their own."""
    short = {role: _short(row.name, values[row.name]) for role, values in wanted.items()}
    return next(iter(short.values())) if len({json.dumps(one, default=str) for one in short.values()}) == 1 else short


def _places(row: Row, wanted: Any, side: SideFacts) -> tuple[str, ...]:
    """Modules whose value is not what is wanted, where that of most is; empty if it is not known or most are wrong."""
    unlike = side.fact(f"{row.name}{UNLIKE}")
    if row.compare != "close" or unlike is None or unlike.value is None:
        return ()
    return tuple(name for name, value in unlike.value if not judge.close(wanted, {row.name: value})[0])[:LISTED]


def _condition(row: Row, wanted: Any, judged: Mapping[str, _Side], allowed: bool, asked: Collection[str]) -> Condition:
    """``asked``: sides whose configuration the user changed."""
    verdicts = {side.ok for side in judged.values()}
    verdict: Verdict = "false" if False in verdicts else "unknown" if None in verdicts or not judged else "ok"
    wrong = tuple(role for role, side in judged.items() if side.ok is not True)
    reasons = {role: side.why for role, side in judged.items() if verdict == "ok" or side.ok is not True}
    common = len({text_of(one) for one in reasons.values()}) == 1 and len(reasons) == len(judged)
    each = [said("condition.of_side", side=role, why=one) for role, one in reasons.items()]
    why = next(iter(reasons.values())) if common else said("list.semicolon", parts=each)
    return Condition(
        name=row.name,
        requested=wanted,
        requested_from=row.requested_from,
        observed={role: side.value for role, side in judged.items()},
        where={role: side.where for role, side in judged.items()},
        verdict=verdict,
        why=text_of(why),
        why_told=why,
        mend=row.mend,
        source=row.source,
        required=row.required,
        allowed=allowed,
        sides=wrong,
        told=row.told is not None
        and verdict == "false"
        and None not in verdicts
        and not allowed
        and not set(wrong) & set(asked),
    )


def _one_side(row: Row, wanted: Any, side: SideFacts, case: Case) -> _Side:
    if row.engines and side.engine not in row.engines:
        return _Side(_NOTHING, side.engine, True, said("condition.nothing", engine=side.engine))
    if row.compare == "token_ids":
        if side.token_ids is None:
            return _Side(None, "", None, said("condition.ids_not_recorded"))
        ok, why = judge.token_ids(wanted, side.token_ids, _caches(side))
        return _Side(_ids_summary(side.token_ids), "ids as the worker saw them", ok, why)
    if row.compare == "files":
        if side.files is None:
            return _Side(None, "", None, said("condition.not_hashed"))
        return _Side(_digest(side.files), "sha256 of the files", True, said("condition.hashed", count=len(side.files)))
    facts = {name: side.fact(name) for name in row.facts}
    known = {name: fact for name, fact in facts.items() if fact is not None and fact.value is not None}
    where = ", ".join(dict.fromkeys(fact.where for fact in facts.values() if fact is not None))
    optional = row.compare in ("warmup", "greedy", "window")
    missing = [name for name in row.facts if name not in known]
    if missing and (not optional or not known or (row.compare == "window" and "window" in missing)):
        first = facts[missing[0]]
        why = said("condition.not_reported", name=missing[0])
        if first is not None:
            why = raw(first.why) if first.why else said("condition.no_value")
        return _Side(None, where, None, why)
    values = {name: fact.value for name, fact in known.items()}
    ok, why = _judge(row, wanted, values, side, case)
    return _Side(_shown(row, values), where, ok, why)


def _caches(side: SideFacts) -> bool:
    """Whether prefixes are kept from earlier requests."""
    caching = side.fact("prefix_caching")
    return caching is not None and caching.value is True


def _judge(row: Row, wanted: Any, values: dict[str, Any], side: SideFacts, case: Case) -> judge.Judged:
    match row.compare:
        case "close":
            return judge.close(wanted, values)
        case "disabled":
            return judge.disabled(values)
        case "off":
            return judge.off(values[row.facts[0]])
        case "same":
            return True, said("condition.read")
        case "soc":
            generation = judge.soc_generation(values["soc_version"])
            if generation:
                return True, said("condition.generation", name=generation)
            return None, said("condition.soc_unknown", version=values["soc_version"])
        case "warmup":
            return judge.warmup(values)
        case "greedy":
            return judge.greedy(values)
        case "chunked_prefill":
            prompts = {request.name: len(request.token_ids) for request in case.requests}
            return judge.chunked_prefill(wanted, values, side.engine, side.steps, prompts, _caches(side))
        case "window":
            return judge.window(wanted, values, capacity(case).max_model_len)
        case "frequencies":
            return judge.frequencies(wanted, values["rope_frequencies"])
        case _:
            return judge.equal(wanted, values)


def _together(row: Row, sides: Mapping[str, SideFacts], judged: dict[str, _Side]) -> dict[str, _Side]:
    """What compares the sides with each other."""
    if any(side.ok is not True for side in judged.values()) or len(judged) < 2:
        return judged
    if row.compare == "files":
        ok, why = judge.same_files({role: side.files or {} for role, side in sides.items()})
    elif row.compare in ("soc", "same"):
        seen = {text_of(side.why) if row.compare == "soc" else str(side.value) for side in judged.values()}
        ok = len(seen) == 1
        why = said("condition.both", value=seen.pop()) if ok else said("condition.sides_differ")
    else:
        return judged
    return {role: _Side(side.value, side.where, ok, why) for role, side in judged.items()}


# ---------------------------------------------------------------------------------------------------------- showing


def _shown(row: Row, values: dict[str, Any]) -> Any:
    """One value where all facts say the same, else all of them by name."""
    if row.compare == "frequencies":
        return _ends(values["rope_frequencies"]["inv_freq"])
    if row.compare == "warmup":
        residue = judge.residue_of_all(values.get("start_residue") or values.get("cache_residue"))
        return None if residue is None else f"{residue[0]} elements in {residue[1]} of {residue[2]} blocks"
    if row.compare == "greedy":
        how = "the best token" if values.get("greedy") is True else "drawn"
        return f"{how}, temperature {values.get('temperature')}, top_k {values.get('top_k')}"
    if row.compare == "chunked_prefill":
        mode = "on" if values["chunked_prefill"] is True else "off"
        return f"{mode}, {values['max_prefill_tokens']} tokens in one step"
    if row.compare == "disabled":
        value = next(iter(values.values()))
        return {True: "on", False: "off"}.get(value, value)
    if row.compare == "soc":
        return f"{judge.soc_generation(values['soc_version'])} ({values['soc_version']})"
    distinct = {json.dumps(value, sort_keys=True) for value in values.values()}
    return next(iter(values.values())) if len(distinct) == 1 else values


def _short(name: str, wanted: Any) -> Any:
    if name == "token_ids":
        return _ids_summary(wanted)
    if name == "rope_frequencies":
        return wanted.get("why") or _ends(wanted["inv_freq"])
    if name == "chunked_prefill":
        return f"off, {wanted} tokens in one step"
    return wanted


def _ends(values: Sequence[float]) -> str:
    return f"{len(values)} from {values[0]:.4g} to {values[-1]:.4g}"


def _ids_summary(ids: Mapping[str, Sequence[int | None]]) -> str:
    seen = sum(one is not None for row in ids.values() for one in row)
    return f"{seen} ids, {_digest({name: list(row) for name, row in ids.items()})}"


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
