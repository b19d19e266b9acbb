"""Inner precision, and rows that are hidden whole."""

from __future__ import annotations

from align.fa.outcome import ABSENT, Outcome, fires_if, unknown
from align.fa.view import View


def inner_known(view: View) -> Outcome:
    inner = view.whole("inner")
    if inner is None:
        return ABSENT
    allowed = (0, 1) if view.operator.family == "ifa" else (0, 1, 2, 3)
    return fires_if(inner not in allowed, inner=inner, allowed=", ".join(map(str, allowed)))


def invalid_rows(view: View) -> Outcome:
    """Rows of queries that see none of their keys, without the correction of inner_precise 2 and 3."""
    count = _invalid(view)
    if isinstance(count, Outcome):
        return count
    return fires_if(count > 0 and view.whole("inner") in (0, 1), count=count, inner=view.whole("inner"))


def invalid_rows_pfa(view: View) -> Outcome:
    """The same, of an operator that has no correction."""
    count = _invalid(view)
    return count if isinstance(count, Outcome) else fires_if(count > 0, count=count)


def _invalid(view: View) -> int | Outcome:
    """How many rows; only those of real queries and their real keys count, not padding of the mask."""
    if view.mask is None or view.mode not in (0, 1):
        return ABSENT
    if view.q_each is None or view.longest_q is None or view.longest_q <= 1:
        return ABSENT if view.q_each else unknown("the lengths of the queries")
    first = None if view.masking is None else view.masking.first_open
    if first is None or view.kv_each is None:
        return unknown("the mask's content" if first is None else "the lengths of the keys")
    if not first:
        return 0
    rows = view.mask.shape[-2]
    matrices = len(first) // rows
    count = 0
    for i, (q, kv) in enumerate(zip(view.q_each, view.kv_each, strict=False)):
        start = rows * (i if matrices > 1 and i < matrices else 0)
        count += sum(one >= kv for one in first[start : start + min(q, rows)])
    return count


def single_corrected(view: View) -> Outcome:
    inner = view.whole("inner")
    if inner is None or view.packed or view.single is not True:
        return ABSENT
    return fires_if(inner in (2, 3), inner=inner)


def fast(view: View) -> Outcome:
    inner = view.whole("inner")
    if inner is None or view.query is None or view.query.dtype != "float16":
        return ABSENT
    return fires_if(inner in (1, 3), inner=inner)


def no_difference(view: View) -> Outcome:
    if view.query is None or view.query.dtype != "bfloat16" or not view.passed("inner"):
        return ABSENT
    return fires_if(view.whole("inner") in (1, 3), inner=view.whole("inner"))
