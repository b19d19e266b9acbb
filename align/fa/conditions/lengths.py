"""Lengths of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.view import View

#: Sequences of a packed call.
MOST = 4096


def q_missing(view: View) -> Outcome:
    return fires_if(not view.passed("q_lengths"), name=view.name("q_lengths")) if view.has("q_lengths") else ABSENT


def kv_missing(view: View) -> Outcome:
    if not view.has("kv_lengths") or view.paged:
        return ABSENT
    return fires_if(not view.passed("kv_lengths"), name=view.name("kv_lengths"))


def kv_missing_paged(view: View) -> Outcome:
    if not view.has("kv_lengths") or not view.paged:
        return ABSENT
    return fires_if(not view.passed("kv_lengths"), name=view.name("kv_lengths"))


def _values(view: View, role: str) -> tuple[int, ...] | None:
    return view.lengths(role).values if view.has(role) else None


def _known(view: View, role: str) -> Outcome | None:
    """What to answer where the values are not there."""
    if not view.has(role) or not view.passed(role):
        return ABSENT
    return unknown(f"the values of {view.name(role)}") if _values(view, role) is None else None


def negative(view: View) -> Outcome:
    for role in ("q_lengths", "kv_lengths"):
        found = [one for one in _values(view, role) or () if one < 0]
        if found:
            return fires(name=view.name(role), given=found[0])
    return HOLDS if _values(view, "q_lengths") or _values(view, "kv_lengths") else ABSENT


def _decreasing(view: View, role: str) -> Outcome:
    answer = _known(view, role)
    if answer is not None:
        return answer
    values = _values(view, role) or ()
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            return fires(name=view.name(role), at=i, value=values[i], before=values[i - 1], given=values)
    return HOLDS


def q_decreasing(view: View) -> Outcome:
    return _decreasing(view, "q_lengths") if view.ends else ABSENT


def kv_decreasing(view: View) -> Outcome:
    return _decreasing(view, "kv_lengths") if view.kv_ends else ABSENT


def _raw(view: View, role: str, tokens: int | None) -> Outcome:
    """Lengths that were not summed: their sum is the number of tokens, their last is not."""
    answer = _known(view, role)
    if answer is not None or tokens is None:
        return answer or ABSENT
    values = _values(view, role) or ()
    raw = len(values) > 1 and sum(values) == tokens and values[-1] != tokens
    return fires_if(raw, name=view.name(role), given=values, tokens=tokens)


def q_raw(view: View) -> Outcome:
    return _raw(view, "q_lengths", view.tokens) if view.ends else ABSENT


def kv_raw(view: View) -> Outcome:
    return _raw(view, "kv_lengths", view.axis(view.key, "T")) if view.kv_ends else ABSENT


def _end(view: View, role: str, tokens: int | None) -> Outcome:
    answer = _known(view, role)
    if answer is not None or tokens is None:
        return answer or ABSENT
    values = _values(view, role) or ()
    return fires_if(bool(values) and values[-1] > tokens, name=view.name(role), end=values[-1:], tokens=tokens)


def q_end(view: View) -> Outcome:
    return _end(view, "q_lengths", view.tokens) if view.ends else ABSENT


def kv_end(view: View) -> Outcome:
    return _end(view, "kv_lengths", view.axis(view.key, "T")) if view.kv_ends else ABSENT


def q_short(view: View) -> Outcome:
    """Tokens behind the last end are not computed. Lengths that were not summed are another rule's."""
    answer = _known(view, "q_lengths")
    if answer is not None or view.tokens is None or not view.ends:
        return answer or ABSENT
    values = _values(view, "q_lengths") or (0,)
    short = values[-1] < view.tokens and not (len(values) > 1 and sum(values) == view.tokens)
    return fires_if(short, name=view.name("q_lengths"), end=values[-1], tokens=view.tokens)


def q_within(view: View) -> Outcome:
    if view.packed:
        return ABSENT
    return _within(view, "q_lengths", view.axis(view.query, "S"))


def kv_within(view: View) -> Outcome:
    if view.packed or view.paged:
        return ABSENT
    return _within(view, "kv_lengths", view.axis(view.key, "S") or view.context.kv_len)


def kv_within_table(view: View) -> Outcome:
    if not view.paged:
        return ABSENT
    if view.reach is None:
        return unknown("block table and block size")
    return _within(view, "kv_lengths", view.reach)


def _within(view: View, role: str, most: int | None) -> Outcome:
    answer = _known(view, role)
    if answer is not None or most is None:
        return answer or ABSENT
    for i, one in enumerate(_values(view, role) or ()):
        if one > most:
            return fires(name=view.name(role), at=i, value=one, most=most)
    return HOLDS


def q_count(view: View) -> Outcome:
    return ABSENT if view.packed else _count(view, "q_lengths", view.axis(view.query, "B"))


def kv_count(view: View) -> Outcome:
    if view.operator.layout:  # ATB: exactly one each
        wanted, values = view.batch, _values(view, "kv_lengths")
        if wanted is None or values is None:
            return ABSENT
        return fires_if(len(values) != wanted, name=view.name("kv_lengths"), count=len(values), batch=wanted)
    if view.packed and view.paged:  # one each; more are those of padding rows
        values = _values(view, "kv_lengths")
        if values is not None and view.batch is not None and len(values) > view.batch:
            return HOLDS
    return _count(view, "kv_lengths", view.batch, view.packed)


def _count(view: View, role: str, batch: int | None, exact: bool = False) -> Outcome:
    answer = _known(view, role)
    if answer is not None or batch is None:
        return answer or ABSENT
    count = len(_values(view, role) or ())
    right = count == batch if exact else count == 1 or count >= batch
    return fires_if(not right, name=view.name(role), count=count, batch=batch)


def limit(view: View) -> Outcome:
    values = _values(view, "q_lengths")
    return ABSENT if values is None or not view.ends else fires_if(len(values) > MOST, count=len(values), most=MOST)


def zero_q(view: View) -> Outcome:
    """In decode every sequence has a query."""
    return _no_zero(view, "q_lengths", view.q_each)


def zero_kv(view: View) -> Outcome:
    """In decode every sequence has a key."""
    return _no_zero(view, "kv_lengths", view.kv_each)


def _no_zero(view: View, argument: str, each: Sequence[int] | None) -> Outcome:
    if not view.passed(argument):
        return ABSENT
    if each is None:
        return unknown(f"the values of {view.name(argument)}")
    at = [i for i, one in enumerate(each) if one == 0]
    return fires(name=view.name(argument), at=at[0]) if at else HOLDS


def decode_next(view: View) -> Outcome:
    """One query, and one more for each token that is drafted ahead."""
    if view.context.next_n is None:
        return ABSENT
    if view.q_each is None:
        return unknown("the lengths of the queries")
    wanted = view.context.next_n + 1
    at = [i for i, one in enumerate(view.q_each) if one not in (0, wanted)]
    return fires(at=at[0], given=view.q_each[at[0]], wanted=wanted) if at else HOLDS


def decode_long(view: View) -> Outcome:
    if view.context.next_n is not None or view.q_each is None:
        return ABSENT
    return fires_if(max(view.q_each, default=0) > 1, q=view.longest_q)


def covers(view: View) -> Outcome:
    """A token sees at least itself, so keys are no fewer than queries."""
    causal = view.mode in (2, 3, 4) or view.causal is True or view.operator.family == "atb_paged"
    if not causal or view.partial or view.causal is False:
        return ABSENT
    if view.q_each is None or view.kv_each is None:
        return unknown("the lengths of queries and keys")
    less = [(i, q, kv) for i, (q, kv) in enumerate(zip(view.q_each, view.kv_each, strict=False)) if 0 <= kv < q]
    return fires(at=less[0][0], q=less[0][1], kv=less[0][2]) if less else HOLDS


def q_step(view: View) -> Outcome:
    return _step(view, view.q_each, view.context.q_lens, "q_lengths")


def kv_step(view: View) -> Outcome:
    return _step(view, view.kv_each, view.context.kv_lens, "kv_lengths")


def _step(view: View, each: tuple[int, ...] | None, known: tuple[int, ...] | None, role: str) -> Outcome:
    """The step's own bookkeeping is what the arguments must say."""
    if known is None or not view.has(role):
        return ABSENT
    if each is None:
        return unknown(f"the values of {view.name(role)}")
    if view.token_rows:
        known = _of_tokens(view, role)
    return fires_if(tuple(each[: len(known)]) != known, name=view.name(role), given=each, known=known)


def _of_tokens(view: View, role: str) -> tuple[int, ...]:
    """The step's lengths where each token is a sequence of its own: its keys are those of its sequence."""
    q_lens = view.context.q_lens or ()
    wanted = (1,) * len(q_lens) if role == "q_lengths" else view.context.kv_lens or ()
    return tuple(one for one, count in zip(wanted, q_lens, strict=False) for _ in range(count))


def q_ignored(view: View) -> Outcome:
    size = view.axis(view.query, "S")
    return fires_if(view.passed("q_lengths"), name=view.name("q_lengths")) if size == 1 else ABSENT


def atb_sum(view: View) -> Outcome:
    """ATB takes the lengths as they are; their sum is the number of tokens."""
    answer = _known(view, "q_lengths")
    if answer is not None or view.tokens is None:
        return answer or ABSENT
    values = _values(view, "q_lengths") or ()
    return fires_if(sum(values) != view.tokens, name=view.name("q_lengths"), given=values, tokens=view.tokens)


def atb_dtype(view: View) -> Outcome:
    for role in ("q_lengths", "kv_lengths"):
        one = view.tensor(role)
        if one is not None and one.dtype != "int32":
            return fires(name=view.name(role), dtype=one.dtype)
    return HOLDS


def form_fits(view: View) -> Outcome:
    values = _values(view, "q_lengths")
    if not view.ends or not values or view.tokens is None or values[-1] != view.tokens:
        return ABSENT
    rising = all(a <= b for a, b in zip((0, *values), values, strict=False))
    return fires(name=view.name("q_lengths"), tokens=view.tokens) if rising else ABSENT
