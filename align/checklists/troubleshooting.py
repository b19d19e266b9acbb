"""The 8 entries of seed 003's troubleshooting: ``failed`` is what this run shows."""

from __future__ import annotations

from collections.abc import Callable

from align.checklists.facts import Answer, Facts, apart, compared, damaged, failed, hidden, ok, per_side
from align.result.symptom import SymptomRow
from align.sentences import Said, is_said, raw, said, text_of

_GROWS = "003-SY-3"


def grows_on_a_clean_cache(facts: Facts) -> Answer:
    """TS-01."""
    row = None if facts.result.symptom is None else _row(facts)
    if row is None or row.state == "not observable":
        reason = said("checklist.earlier") if row is None else _told(row)
        return facts.stopped or hidden("growth_unknown", why=reason)
    total = 0 if facts.result.tokens is None else facts.result.tokens.total
    if row.state == "not shown":
        return ok(total, "no_growth", total=total, why=_told(row)) if total else hidden("no_tokens")
    looked, why = facts.ledger()
    if why is not None:
        return why
    faults = sum(one.faults for one in facts.result.ledger.values())
    if faults:
        return ok(max(total, 1), "growth_by_cache", faults=faults, why=_told(row))
    numbers = tuple(number for number, one in facts.numbered if one.path != "A")
    writes = sum(one.writes for one in looked.values())
    return failed("growth", numbers, total or None, why=_told(row), writes=writes)


def idle_groups(facts: Facts) -> Answer:
    """TS-02."""
    layout = facts.layout
    if layout is None:
        return hidden("no_case")
    if layout[1] == 1:
        return apart("one_group", layout=facts.result.case.layout if facts.result.case else "")
    numbers = tuple(
        number
        for number in facts.of_fault({"dummy_write"})
        if facts.result.findings[number - 1].evidence.get("detail", {}).get("rows") == "idle"
    )
    if numbers:
        return failed("indices", numbers, parts=facts.whats(numbers))
    looked, why = facts.ledger()
    if why is not None:
        return why
    recordings, lacking = facts.recordings()
    if lacking is not None:
        return lacking
    rows = sum(one.idle_rows for one in looked.values())
    dummies = sum(one.dummies for one in recordings.values())
    if not rows + dummies:
        return apart("never_idle")
    return ok(rows + dummies, "idle_apart", dummies=dummies, rows=rows)


def by_dimension(facts: Facts) -> Answer:
    """TS-03."""
    result, layout = facts.result, facts.layout
    if layout is None or result.case is None:
        return hidden("no_case")
    if layout[1:] == (1, 1):
        return apart("no_dp_ep", layout=result.case.layout)
    if facts.stopped is not None:
        return facts.stopped
    if result.verdict == "aligned":
        requests = len(result.case.requests)
        return ok(requests, "aligned_at", layout=result.case.layout, requests=requests)
    conclusion = None if result.ladder is None else result.ladder.conclusion
    if result.ladder is None or conclusion is None or conclusion.state == "unknown":
        return hidden("dimension_unknown", layout=result.case.layout)
    what = conclusion.told if is_said(conclusion.told) else raw(conclusion.sentence)
    shown = conclusion.state == "unclear" or conclusion.dimension in ("dp", "ep")
    rungs = len(result.ladder.rungs)
    if shown:
        return failed("ladder_says", (1,) if result.findings else (), rungs, what=what)
    return ok(rungs, "ladder_says", what=what)


def garbled(facts: Facts) -> Answer:
    """TS-04."""
    recordings, lacking = facts.recordings()
    if lacking is not None:
        return lacking
    if (broken := damaged(recordings)) is not None:
        return broken
    counts = {side: one.steps for side, one in recordings.items()}
    if not all(counts.values()):
        return failed("empty", count=0, side=next(side for side, count in counts.items() if not count))
    return ok(sum(counts.values()), "all_read", parts=list(per_side(counts)))


def left_by_warmup(facts: Facts) -> Answer:
    """TS-05."""
    numbers = (*facts.of_fault({"dirty_cache"}), *facts.of_kind("residue"))
    if numbers:
        return failed("indices", numbers, parts=facts.whats(numbers))
    own = facts.held("warmup")
    if own.state != "ok":
        return own
    if not facts.result.stability:
        return facts.stopped or hidden("not_twice")
    unstable = _unstable(facts)
    if unstable:  # what warm-up did not leave, a wrong index may have
        stomped = tuple(number for number, one in facts.numbered if one.path == "A")
        about = {"parts": own.what["parts"], "sides": unstable}
        return failed("polluted", stomped, **about) if stomped else hidden("not_warmup", **about)
    return ok(len(facts.result.stability), "nothing_left", parts=own.what["parts"])


def from_run_to_run(facts: Facts) -> Answer:
    """TS-06."""
    result, greedy = facts.result, facts.held("greedy")
    unstable = _unstable(facts)
    if unstable:
        return failed("unstable_sides", facts.of_kind("residue"), parts=unstable)
    if greedy.state == "failed":
        return greedy
    tokens: dict[str, int] = {one.side: one.tokens for one in result.stability}
    if not tokens or not all(tokens.values()):
        return facts.stopped or hidden("not_twice")
    return ok(sum(tokens.values()), "repeated", parts=list(per_side(tokens)))


def _unstable(facts: Facts) -> list[Said]:
    """Sides that do not repeat themselves, in words."""
    sides = [one for one in facts.result.stability if not one.stable]
    return [said("checklist.unstable", side=one.side, **_first(one.first)) for one in sides]


def _first(first: dict[str, object] | None) -> dict[str, object]:
    first = first or {}
    return {"request": str(first.get("request", "?")), "index": str(first.get("index", "?"))}


def layer_0_skipped(facts: Facts) -> Answer:
    """TS-07. This run compares every layer, so that nothing is bisected; unless layer 0 was left out."""
    tensors, first = facts.result.tensors, facts.layer_0()
    if tensors is None:
        return facts.stopped or hidden("no_tensors")
    if not tensors.layers:
        return hidden("no_layers")
    if first is not None and compared(first) == first.total > 0:
        layers = sum(one.layer is not None and compared(one) > 0 for one in tensors.layers)
        of = sum(one.layer is not None for one in tensors.layers)
        return ok(layers, "from_layer_0", layers=layers, of=of, total=first.total)
    looked, total = (0, 0) if first is None else (compared(first), first.total)
    headline = facts.headline
    if headline is not None and (headline.layer or 0) > 0:
        return failed("layer_0_skipped", (1,), looked, looked=looked, total=total, layer=headline.layer)
    return hidden("layer_0_partial", looked=looked, total=total)


def guilt_unclear(facts: Facts) -> Answer:
    """TS-08."""
    result = facts.result
    if result.tensors is None:
        return facts.stopped or hidden("no_tensors")
    told_by = result.diagnosis
    clear = told_by.checkpoint if told_by is not None and told_by.side is not None else None
    open_ = tuple(
        number
        for number, one in facts.numbered
        if one.kind == "unexplained"
        and one.evidence.get("inputs_state") in ("equal", "within")
        and (one.checkpoint is None or one.checkpoint != clear)
    )
    total = sum(compared(one) for one in result.tensors.layers)
    if open_:
        return failed("guilt_unclear", open_, total or None, parts=facts.whats(open_))
    if not total:
        return hidden("no_layers")
    return ok(total, "guilt_clear", total=total, beyond=len(result.tensors.beyond), findings=len(facts.numbered))


def _row(facts: Facts) -> SymptomRow | None:
    assert facts.result.symptom is not None
    return next((one for one in facts.result.symptom.rows if one.row == _GROWS), None)


def _told(row: SymptomRow) -> Said:
    try:
        text_of(row.told)
    except (KeyError, TypeError):  # of an earlier version
        return raw(row.why)
    return row.told


JUDGES: dict[str, Callable[[Facts], Answer]] = {
    "003-TS-01": grows_on_a_clean_cache,
    "003-TS-02": idle_groups,
    "003-TS-03": by_dimension,
    "003-TS-04": garbled,
    "003-TS-05": left_by_warmup,
    "003-TS-06": from_run_to_run,
    "003-TS-07": layer_0_skipped,
    "003-TS-08": guilt_unclear,
}
