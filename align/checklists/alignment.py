"""The 10 items of seed 003's checklist: what must have been done before a verdict means anything."""

from __future__ import annotations

from collections.abc import Callable

from align.checklists.facts import Answer, Facts, apart, compared, damaged, failed, hidden, ok, per_side, what_of
from align.findings import PATHS
from align.result.parts import Finding
from align.sentences import is_said, raw, said, told

#: Of CK-01, as step 2 of the seed has them; the same prompt is CK-03's.
CONTROLLED = ("soc", "warmup", "eager", "tp", "dp", "ep", "greedy")
#: Paths that are about no layer or operator.
_NOWHERE = ("INPUT", "ENV")


def conditions(facts: Facts) -> Answer:
    """CK-01."""
    return facts.held(*CONTROLLED)


def single_request(facts: Facts) -> Answer:
    """CK-02."""
    result = facts.result
    if facts.stopped is not None or result.case is None:
        return facts.stopped or hidden("no_case")
    requests = len(result.case.requests)
    if requests == 1:
        return ok(1, "one_request", request=result.case.requests[0].name)
    if result.verdict == "aligned":
        return apart("nothing_wrong")
    alone = result.alone
    if alone is not None:
        key = "alone_same" if alone.reproduced else "alone_other"
        return ok(1, key, request=alone.request, checkpoint=alone.checkpoint)
    if result.source == "compare":
        return hidden("recordings_alone")
    first = facts.headline
    name = next(iter(first.requests if first is not None else ()), result.case.requests[0].name)
    return failed("not_alone", count=requests, requests=requests, request=name.partition(" (run ")[0])


def output_tokens(facts: Facts) -> Answer:
    """CK-03."""
    tokens, prompts = facts.result.tokens, facts.held("token_ids")
    if prompts.state != "ok":
        return prompts
    if tokens is None or tokens.total == 0:
        return facts.stopped or hidden("no_tokens")
    outcomes = [one.outcome for one in tokens.free.requests]
    counts = {name: outcomes.count(name) for name in ("equal", "near_tie", "diverged")}
    return ok(
        tokens.total,
        "tokens_compared",
        total=tokens.total,
        requests=len(outcomes),
        parts=prompts.what["parts"],
        **counts,
    )


def layouts(facts: Facts) -> Answer:
    """CK-04."""
    result, layout = facts.result, facts.layout
    if facts.stopped is not None or layout is None or result.case is None:
        return facts.stopped or hidden("no_case")
    ladder = result.ladder
    if ladder is not None:
        if ladder.conclusion is None or ladder.conclusion.state == "unknown":
            return hidden("ladder_open")
        rungs = [said("checklist.rung", layout=one.layout, verdict=one.verdict) for one in ladder.rungs]
        return ok(len(rungs), "rungs", parts=rungs)
    if layout == (1, 1, 1):
        return ok(1, "simplest", layout=result.case.layout)
    if result.verdict == "aligned":
        return apart("no_level", layout=result.case.layout)
    if result.source == "compare":
        return hidden("recordings_alone")
    return failed("no_ladder", layout=result.case.layout)


def path(facts: Facts) -> Answer:
    """CK-05."""
    return _of_headline(facts, "nothing_wrong", _path)


def _path(facts: Facts, first: Finding) -> Answer:
    if first.path == "UNLOCATED":
        return failed("not_located", (1,))
    about = {"path": first.path, "name": PATHS[first.path], "kind": first.kind}
    return ok(len(facts.numbered), "path" if len(first.path) == 1 else "path_other", count=len(facts.numbered), **about)


def files(facts: Facts) -> Answer:
    """CK-06."""
    recordings, why = facts.recordings()
    if why is not None:
        return why
    if (broken := damaged(recordings)) is not None:
        return broken
    counts = {side: one.steps for side, one in recordings.items()}
    if not all(counts.values()):
        return hidden("no_tensors")
    ranks = [said("checklist.ranks", side=side, ranks=one.ranks) for side, one in recordings.items()]
    return ok(sum(counts.values()), "files_ok", parts=list(per_side(counts)), ranks=ranks)


def layer_0_first(facts: Facts) -> Answer:
    """CK-07."""
    tensors, first = facts.result.tensors, facts.layer_0()
    if tensors is None:
        return facts.stopped or hidden("no_tensors")
    if not tensors.layers:
        return hidden("no_layers")
    looked = 0 if first is None else compared(first)
    total = 0 if first is None else first.total
    if first is not None and looked == total > 0:
        about = {name: getattr(first, name) for name in ("equal", "within", "beyond")}
        return ok(total, "layer_0", total=total, **about)
    headline = facts.headline
    if headline is not None and (headline.layer or 0) > 0:
        return failed("layer_0_skipped", (1,), count=looked, looked=looked, total=total, layer=headline.layer)
    return hidden("layer_0_partial", looked=looked, total=total)


def first_place(facts: Facts) -> Answer:
    """CK-08."""
    return _of_headline(facts, "nothing_wrong", _place)


def _place(facts: Facts, first: Finding) -> Answer:
    if first.checkpoint is not None:
        layer = said("checklist.layer", layer=first.layer) if first.layer is not None else ""
        kind = str(first.evidence.get("fault") or first.kind)
        return ok(len(facts.numbered), "place", checkpoint=first.checkpoint, kind=kind, layer=layer)
    if first.path in _NOWHERE:
        return apart("no_place", path=PATHS[first.path])
    return failed("not_placed", (1,), kind=first.kind)


def inputs(facts: Facts) -> Answer:
    """CK-09."""
    return _of_headline(facts, "nothing_wrong", _inputs)


def _inputs(facts: Facts, first: Finding) -> Answer:
    result = facts.result
    if first.path in _NOWHERE:
        return ok(1, "upstream", path=PATHS[first.path], what=what_of(first))
    if first.path == "A":
        looked, why = facts.ledger()
        if why is None and (writes := sum(one.writes for one in looked.values())):
            return ok(writes, "indices_are_inputs", writes=writes)
    told_by = result.diagnosis
    if told_by is not None and told_by.checkpoint == first.checkpoint:
        rows = sum(one.rows for one in told_by.sides.values() if one.verdict in ("within", "beyond"))
        if rows:
            why_told = told_by.told if is_said(told_by.told) else raw(told_by.why)
            return ok(rows, "recomputed", rows=rows, checkpoint=first.checkpoint, why=why_told)
    shown = () if result.tensors is None else result.tensors.shown
    numbers = next((one for one in shown if one.name == first.checkpoint), None)
    state = first.evidence.get("inputs_state") or (None if numbers is None else numbers.inputs)
    if state in ("equal", "within"):
        rows = 1 if numbers is None else max(numbers.rows, 1)
        return ok(rows, f"inputs_{state}", checkpoint=first.checkpoint or first.kind, rows=rows)
    if state == "beyond":
        return failed("inputs_differ", (1,), checkpoint=first.checkpoint or first.kind)
    return hidden("inputs_unknown", checkpoint=first.checkpoint or first.kind)


def mended(facts: Facts) -> Answer:
    """CK-10."""
    result, paired = facts.result, facts.result.paired
    if paired is None:
        if facts.stopped is not None:
            return facts.stopped
        return apart("nothing_wrong") if result.verdict == "aligned" else hidden("no_fix")
    what = told(paired.told) if is_said(paired.told) else raw(paired.what)
    if paired.outcome == "same":
        return apart("nothing_to_mend", what=what)
    if paired.outcome == "unknown" or (paired.outcome == "mended" and not paired.conclusive):
        return hidden("fix_unknown", what=what)
    if paired.outcome == "mended":
        total = 0 if result.tokens is None else result.tokens.total
        return ok(total, "mended", total=total, what=what) if total else hidden("no_tokens")
    return failed("not_mended", (1,) if result.findings else (), what=what)


def _of_headline(facts: Facts, otherwise: str, judge: Callable[[Facts, Finding], Answer]) -> Answer:
    """Of a run that diverged; of one that did not there is nothing to name."""
    if facts.headline is not None:
        return judge(facts, facts.headline)
    if facts.stopped is not None:
        return facts.stopped
    return apart(otherwise) if facts.result.verdict == "aligned" else failed("tokens_alone")


JUDGES: dict[str, Callable[[Facts], Answer]] = {
    "003-CK-01": conditions,
    "003-CK-02": single_request,
    "003-CK-03": output_tokens,
    "003-CK-04": layouts,
    "003-CK-05": path,
    "003-CK-06": files,
    "003-CK-07": layer_0_first,
    "003-CK-08": first_place,
    "003-CK-09": inputs,
    "003-CK-10": mended,
}
