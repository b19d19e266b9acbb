"""The 17 items of seed 000: attention's arguments and the cache.

Items about what each call of attention was handed are ``ok`` by the record of these calls alone: a layer that knows its
scale may still hand over another one. What the run knows besides (conditions, the audit of the cache's indices) can
fail them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from align.checklists.facts import SIDES, Answer, Facts, apart, failed, hidden, ok, per_side
from align.checklists.table import Item
from align.result.ledger import LedgerLooked
from align.sentences import Said, said

#: Kinds of wrong lengths of keys.
_LENGTHS = frozenset(("wrong_length", "frozen_length", "doubled_length"))
Judge = Callable[[Facts, Item], Answer]
#: Of a rule of :mod:`align.fa` and the number of a finding of it: whether the finding counts.
Counts = Callable[[Facts, str, int], bool]


def _all(facts: Facts, rule: str, number: int) -> bool:
    return True


_ALL: Counts = _all


def cache_dtype(facts: Facts, item: Item) -> Answer:
    """Q01."""
    if facts.model.get("quantised_cache"):
        return apart("quantised_cache")
    own = facts.held("dtype")
    if own.state == "ok":
        one = facts.conditions["dtype"]
        places = [said("checklist.side_value", side=side, value=where) for side, where in one.where.items()]
        own = ok(len(places), "dtype_ok", dtype=str(one.requested), places=places) if places else own
    return _worst(own, calls(facts, item))


def device(facts: Facts, item: Item) -> Answer:
    """Q02. That no float came from the host is no proof: a record of the calls is."""
    numbers = facts.of_kind("host fallback")
    if numbers:
        return failed("from_host", numbers, parts=facts.whats(numbers))
    return calls(facts, item) or hidden("no_calls")


def table_dtype(facts: Facts, item: Item) -> Answer:
    """Q03."""
    numbers = tuple(
        number
        for number in facts.of_fault({"index_dtype"})
        if facts.result.findings[number - 1].evidence.get("detail", {}).get("name") == "tables"
    )
    return _audited(facts, item, numbers, "tables_ok", lambda one: sum(one.table_dtypes.values()))


def by_calls(facts: Facts, item: Item) -> Answer:
    """Q04, Q09, Q11, Q12, Q13, Q14, Q16: the record of the calls alone."""
    return calls(facts, item) or hidden("no_calls")


def own_arguments(facts: Facts, item: Item) -> Answer:
    """Q05. One configuration for both phases is right over pages (seed 001), so each phase is judged by the rules that
    are about it."""
    return calls(facts, item, ("prefill", "decode")) or hidden("no_calls")


def scale(facts: Facts, item: Item) -> Answer:
    """Q06."""
    return _known(facts, item, "attention_scale", "head_dim")


def heads(facts: Facts, item: Item) -> Answer:
    """Q07."""
    return _known(facts, item, "heads", "kv_heads")


def length_after_prefill(facts: Facts, item: Item) -> Answer:
    """Q08."""
    numbers = tuple(number for number in facts.of_fault(_LENGTHS) if _in_prefill(facts, number))
    return _audited(facts, item, numbers, "lengths_ok", lambda one: one.prefill_lengths, _of_prefill)


def lengths(facts: Facts, item: Item) -> Answer:
    """Q10."""
    numbers = facts.of_fault({"not_cumulative", "wrong_q_len"} | _LENGTHS)
    if numbers:
        return failed("indices", numbers, parts=facts.whats(numbers))
    return calls(facts, item) or hidden("no_calls")


def latent(facts: Facts, item: Item) -> Answer:
    """Q15."""
    known = facts.model.get("latent_attention")
    if known is False:
        return apart("no_latent", architecture=str(facts.model.get("architecture", "?")))
    return calls(facts, item) or hidden("no_calls" if known else "no_model")


def length_in_layers(facts: Facts, item: Item) -> Answer:
    """Q17."""
    return _audited(facts, item, facts.of_fault({"layer_length"}), "layers_ok", lambda one: one.layer_lengths)


JUDGES: dict[str, Judge] = {
    "000-Q01": cache_dtype,
    "000-Q02": device,
    "000-Q03": table_dtype,
    "000-Q04": by_calls,
    "000-Q05": own_arguments,
    "000-Q06": scale,
    "000-Q07": heads,
    "000-Q08": length_after_prefill,
    "000-Q09": by_calls,
    "000-Q10": lengths,
    "000-Q11": by_calls,
    "000-Q12": by_calls,
    "000-Q13": by_calls,
    "000-Q14": by_calls,
    "000-Q15": latent,
    "000-Q16": by_calls,
    "000-Q17": length_in_layers,
}


# ----------------------------------------------------------------------------------------------------- what decides


def calls(facts: Facts, item: Item, phases: Collection[str] = (), counts: Counts = _ALL) -> Answer | None:
    """What the record of attention's calls says; ``None`` where there is none.

    Args:
        phases: on each side calls of each of these must have been judged.
        counts: whether a finding of a rule counts.
    """
    fa, rules = facts.fa, set(item.rules)
    if fa is None:
        return None
    found = {rule: [number for number in fa.wrong.get(rule, ()) if counts(facts, rule, number)] for rule in item.rules}
    wrong = [rule for rule, numbers in found.items() if numbers]
    judged = [one for one in fa.calls if one.judged & rules]
    count = sum(one.count for one in judged)
    if wrong:
        numbers = tuple(sorted({number for rule in wrong for number in found[rule]}))
        return failed("calls_wrong", numbers, count or None, rules=wrong, parts=facts.whats(numbers))
    unseen = sum(one.count for one in fa.calls if one.unseen & rules and not one.judged & rules)
    if unseen:
        return hidden("calls_unseen", count=unseen, total=unseen + count)
    if not judged:
        return apart("calls_none", total=sum(one.count for one in fa.calls))
    missing = [
        said("checklist.phase_of", side=side, phase=phase)
        for side in SIDES
        for phase in phases
        if not any(one.side == side and one.phase in (phase, "mixed") for one in judged)
    ]
    if missing:
        return hidden("calls_phase", parts=missing)
    by_side = {side: sum(one.count for one in judged if one.side == side) for side in SIDES}
    warned = [said("checklist.warned", rule=rule, count=fa.warned[rule]) for rule in item.rules if rule in fa.warned]
    key = "calls_warned" if warned else "calls_ok"
    return ok(count, key, parts=list(per_side(by_side)), rules=list(item.rules), warned=warned)


def _worst(own: Answer, called: Answer | None) -> Answer:
    """Of what the run knows anyhow and the record of the calls: what failed first, then what decides."""
    if called is not None and called.state == "failed" and own.state != "failed":
        return called
    return own


def _known(facts: Facts, item: Item, *names: str) -> Answer:
    """Conditions that fail an item by themselves, and are no proof of what was handed over."""
    own = facts.held(*names)
    if own.state == "failed":
        return own
    called = calls(facts, item)
    if called is not None:
        return called
    return hidden("no_calls_but", parts=own.what["parts"]) if own.state == "ok" else hidden("no_calls")


def _audited(
    facts: Facts,
    item: Item,
    wrong: tuple[int, ...],
    key: str,
    count: Callable[[LedgerLooked], int],
    counts: Counts = _ALL,
) -> Answer:
    """By the audit of the cache's indices, whose faults are ``wrong``."""
    if wrong:
        return failed("indices", wrong, parts=facts.whats(wrong))
    called = calls(facts, item, counts=counts)
    looked, why = facts.ledger()
    if why is not None:
        return _worst(why, called)
    numbers = {side: count(one) for side, one in looked.items()}
    if not all(numbers.values()):
        side = next(side for side, number in numbers.items() if not number)
        return _worst(hidden("nothing_looked_at", side=side), called)
    parts: list[Said] = list(per_side(numbers))
    return _worst(ok(sum(numbers.values()), key, parts=parts), called)


def _of_prefill(facts: Facts, rule: str, number: int) -> bool:
    """No keys at all in decode are what prefill left; any other wrong length of a decode step is not."""
    return rule == "fa.lengths.zero-kv" or _in_prefill(facts, number)


def _in_prefill(facts: Facts, number: int) -> bool:
    finding = facts.result.findings[number - 1]
    phases = (finding.evidence.get("scope") or {}).get("phases") or [finding.phase]
    return bool({"prefill", "mixed"} & set(phases))
