"""From a wrong tensor under parallelism to what is wrong with the communication: hypotheses, each with its number.

Three places are explained: a reduce whose result is not the sum of the ranks' parts, copies that differ between ranks,
and a tensor that differs between the sides although its inputs agree. What fits gives the finding its kind; what does
not, and what could not be tried, stays in the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from align.checkpoints.table import EXPERT_SUM, Name, Structure, parse
from align.collectives import shards
from align.collectives.blocks import summed
from align.collectives.expert_sums import sums_tried
from align.collectives.hypotheses import (
    MISSING,
    STALE,
    Held,
    Reduced,
    Tried,
    first_fit,
    hypotheses_of,
    wrong_ranks,
)
from align.collectives.replicas import groups_of
from align.collectives.routed_sides import SUMMED, world_of, wrong_side
from align.collectives.sides import accused, flat, mapped, other_rows, whole
from align.compare.bits import same_bits
from align.compare.collective import OPERATOR
from align.compare.expert_sum import expert_parts
from align.compare.rows import Recorded, ranks_of, real_steps
from align.compare.tensors import TensorComparison
from align.findings import Finding, told
from align.sentences import said
from align.trace.format import StepEntry

#: Wrong steps of a phase that are explained, and steps that are searched for what a rank held before.
_STEPS, _EARLIER = 3, 6
Tensor = torch.Tensor


def explained(findings: Sequence[Finding], compared: TensorComparison, traces: Mapping[str, Recorded]) -> list[Finding]:
    """The same findings, those of path C and unexplained ones under parallelism with what was tried on them."""
    found = []
    for finding in findings:
        try:
            found.append(_explained(finding, compared, traces))
        except (ValueError, RuntimeError) as error:  # one bad record never ends it
            evidence = {**finding.evidence, "hypotheses": [], "hypotheses_why": str(error)}
            found.append(replace(finding, evidence=evidence))
    return found


def _explained(finding: Finding, compared: TensorComparison, traces: Mapping[str, Recorded]) -> Finding:
    if finding.checkpoint is None:
        return finding
    name = parse(finding.checkpoint)
    if finding.path == "C" and finding.kind == "collective" and finding.side is not None:
        return _of_reduce(finding, name, compared, traces)
    if finding.path == "C" and finding.kind in (shards.HEAD_MAP, shards.SHARD) and finding.side is not None:
        return _of_shard(finding, name, finding.side, compared, traces)
    if finding.path == "B" and finding.kind == "unexplained":
        return _of_sides(finding, name, compared, traces)
    return finding


# ------------------------------------------------------------------------------------------------------------ reduces


def _of_reduce(finding: Finding, name: Name, compared: TensorComparison, traces: Mapping[str, Recorded]) -> Finding:
    side = str(finding.side)
    trace = traces[side]
    structure = trace.structure
    if structure is not None and structure.operator(name.kind) == EXPERT_SUM:
        return told_by(finding, merged(list(_of_experts(trace, name))))
    if structure is None or structure.operator(name.kind) != OPERATOR:
        return finding
    tried: list[tuple[Tried, ...]] = []
    missing: Tried | None = None
    for step, given in _wrong_steps(trace, name, structure):
        found = hypotheses_of(given)
        if not found:
            continue
        tried.append(found)
        if missing is None:
            missing = _sum_of(given, side, step, name, compared, traces)
    every = merged(tried)
    if missing is not None:
        every = tuple(_with_sum(one, missing) if one.name == MISSING else one for one in every)
    return told_by(finding, every)


def _of_experts(trace: Recorded, name: Name) -> Iterator[tuple[Tried, ...]]:
    """What was tried on the experts' sums of the wrong steps, as many of a phase as are explained."""
    entries = real_steps(trace)
    left = dict.fromkeys((entry.phase for entry in entries), _STEPS)
    for entry in entries:
        parts = expert_parts(trace, name, entry) if left[entry.phase] else ""
        if isinstance(parts, str):
            continue
        results = {rank: trace.tensor(rank, entry.step, str(name)) for rank in parts.routed}
        found = sums_tried(parts, {rank: value for rank, value in results.items() if value is not None})
        if found:
            left[entry.phase] -= 1
            yield found


def _with_sum(one: Tried, sums: Tried) -> Tried:
    """A missing reduce, with what the sum over the ranks is against the other side."""
    about = said("list.semicolon", parts=[one.what, sums.what])
    return replace(one, what=about, numbers={**one.numbers, **sums.numbers})


def told_by(finding: Finding, tried: Sequence[Tried]) -> Finding:
    """A finding of path C with what was tried; what fits gives kind, ranks and sentence."""
    evidence = {**finding.evidence, "hypotheses": [one.to_dict() for one in tried]}
    fit = first_fit(tried)
    if fit is None:
        if not tried:
            return replace(finding, evidence=evidence)
        states = [said("hypothesis.short", name=one.name, what=one.what) for one in tried]
        evidence["tried"] = said("list.semicolon", parts=states)
        return replace(finding, evidence=evidence)
    # What the judge measured stays beside what explains it.
    measured = finding.evidence.get("sentence")
    parts = [fit.what, *([measured] if measured is not None else [])]
    evidence |= {**told(said("list.semicolon", parts=parts)), "hypothesis": fit.name, **dict(fit.numbers)}
    made = Finding("C", fit.name)
    experts = f"{fit.name} experts" if finding.checkpoint and parse(finding.checkpoint).kind.name == SUMMED else ""
    next_ = NEXT.get(experts, NEXT[fit.name]).format(side=finding.side or "accused side", checkpoint=finding.checkpoint)
    ranks = fit.ranks or finding.ranks
    return replace(finding, path="C", kind=made.kind, ranks=ranks, evidence=evidence, next=next_)


#: What to read, by kind, with `` experts`` where experts' rows are exchanged; the report has the same in both languages
#: (``next.KIND``).
NEXT = {
    "missing_reduce": "see why the {side} calls no reduce at {checkpoint}, or one of another group: the layer's flag "
    "(reduce_results, all_reduce, is_tp) and what decides it",
    "doubled_reduce": "see which two places of the {side} reduce {checkpoint}: the layer and its caller",
    "stale_buffer": "see who waits for the {side}'s reduce at {checkpoint}: its stream, its buffer, and when that is "
    "used again",
    "permuted_rows": "see how the {side} reads the buffer of the reduce at {checkpoint}: strides, contiguous(), the "
    "order of the scattered rows",
    "batch_order": "see what orders the batch on each rank of the {side}: the sorting of requests and what it is "
    "decided by",
    "collective": "see what the {side} puts into the reduce at {checkpoint} on each rank: its group, its scale, its "
    "dtype",
    "head_map": "see how the {side} maps heads to ranks at {checkpoint}: heads, key/value heads and their replicas",
    "shard": "see which part of {checkpoint} each rank of the {side} holds",
    "expert_map": "see how the {side} maps experts to ranks at {checkpoint}: global and local numbers, its expert map",
    "collective experts": "see what the {side} hands to the exchange with the experts at {checkpoint} and takes back "
    "on each rank: ids, weights, mask and counts of dispatch and combine, and their group",
    "missing_reduce experts": "see why what other ranks' experts made does not come back to the {side}'s rows at "
    "{checkpoint}: the combine or the reduce behind the experts, its group, and what decides whether it runs",
    "permuted_rows experts": "see in which order the {side} sends rows to the experts and puts their results back at "
    "{checkpoint}: dispatch, combine, and the indices between them",
    "combine_weights": "see where the {side} weighs the experts' results at {checkpoint}: in the router, in the "
    "combine, or in both",
    "gather_order": "see in which order the {side} joins the ranks' parts of {checkpoint}: the group's ranks and the "
    "axis",
}


def merged(tried: Sequence[Sequence[Tried]]) -> tuple[Tried, ...]:
    """One of each hypothesis: it fits if it does in every step in which it could be tried."""
    found: dict[str, list[Tried]] = {}
    for step in tried:
        for one in step:
            found.setdefault(one.name, []).append(one)
    return tuple(_merged(group) for group in found.values())


def _merged(group: Sequence[Tried]) -> Tried:
    known = [one for one in group if one.state != "not observable"]
    if not known:
        return group[0]
    fits = [one for one in known if one.state == "fits"]
    shown = fits[0] if len(fits) == len(known) else next(one for one in known if one.state == "refuted")
    ranks = tuple(dict.fromkeys(rank for one in known for rank in one.ranks)) if shown.state == "fits" else ()
    steps = {"steps_fit": len(fits), "steps_tried": len(known)}
    return replace(shown, ranks=ranks, numbers={**shown.numbers, **steps})


def _wrong_steps(trace: Recorded, name: Name, structure: Structure) -> Iterator[tuple[int, Reduced]]:
    """Steps with the values of a reduce, as many of a phase as are explained; right ones are left out."""
    (source,) = structure.inputs(name)
    for group in groups_of(trace):
        entries = [entry for entry in trace.steps(group[0]) if not entry.dummy]
        left = dict.fromkeys((entry.phase for entry in entries), _STEPS)
        for index, entry in enumerate(entries):
            if not left[entry.phase]:
                continue
            parts = {rank: trace.tensor(rank, entry.step, str(source)) for rank in group}
            results = {rank: trace.tensor(rank, entry.step, str(name)) for rank in group}
            summands = {rank: flat(one) for rank, one in parts.items() if one is not None}
            values = {rank: flat(one) for rank, one in results.items() if one is not None}
            shapes = {one.shape for one in (*summands.values(), *values.values())}
            if len(summands) != structure.tp or not values or len(shapes) > 1:
                continue
            given = Reduced(summands, values, heads=structure.heads, row_names=_names(entry))
            if not wrong_ranks(given):
                continue
            left[entry.phase] -= 1
            before = entries[max(0, index - _EARLIER) : index]
            earlier = {rank: list(_earlier(trace, rank, entry, before, name, structure)) for rank in group}
            yield entry.step, replace(given, earlier=earlier)


def _earlier(
    trace: Recorded, rank: int, entry: StepEntry, before: Sequence[StepEntry], name: Name, structure: Structure
) -> Iterator[Held]:
    """What reduces left on a rank before this one, the newest first."""
    reduces = [one for one in structure.names() if one.kind.name == "embed" or structure.operator(one.kind) == OPERATOR]
    same = [one for one in reduces if one.order < name.order]
    for step, names in [(entry, same), *((one, reduces) for one in reversed(before))]:
        for one in reversed(names):
            value = trace.tensor(rank, step.step, str(one))
            if value is not None:
                yield Held(f"{one} (step {step.step})", flat(value))


def _names(entry: StepEntry) -> list[tuple[str, int]]:
    return [(span.request, at) for span in entry.rows for at in range(span.start, span.start + span.count)]


def _sum_of(
    given: Reduced, side: str, step: int, name: Name, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> Tried | None:
    """The sum over the ranks against the other side's tensor; ``None`` if that has none of these rows."""
    there = other_rows(side, step, str(name), compared, traces)
    if there is None:
        return None
    at, theirs = there
    return summed({rank: part[at] for rank, part in given.parts.items()}, flat(theirs))


# -------------------------------------------------------------------------------------------------------------- copies


def of_copies(
    finding: Finding, name: Name, side: str, step: int, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> tuple[Tried, ...]:
    """What explains that ranks hold different copies: their sum is the other side's tensor, or their rows moved."""
    trace = traces[side]
    found = {rank: trace.tensor(rank, step, str(name)) for rank in ranks_of(trace, step)}
    parts = {rank: value for rank, value in found.items() if value is not None}
    there = other_rows(side, step, str(name), compared, traces)
    if there is None or len(parts) < 2:
        return (Tried(MISSING, "not observable", said("hypothesis.no_other")),)
    at, theirs = there
    sums = summed({rank: flat(value)[at] for rank, value in parts.items()}, flat(theirs))
    return (sums, *_held_before(finding, name, side, step, traces))


def _held_before(finding: Finding, name: Name, side: str, step: int, traces: Mapping[str, Recorded]) -> Iterator[Tried]:
    """Whether a rank's copy is what it held before."""
    trace = traces[side]
    structure = trace.structure
    assert structure is not None
    entries = [entry for entry in trace.steps(ranks_of(trace, step)[0]) if not entry.dummy]
    index = next((at for at, entry in enumerate(entries) if entry.step == step), None)
    if index is None:
        return
    for rank in finding.ranks:
        value = trace.tensor(rank, step, str(name))
        if value is None:
            continue
        before = entries[max(0, index - _EARLIER) : index]
        held = list(_earlier(trace, rank, entries[index], before, name, structure))
        same = next((one for one in held if same_bits(one.values, flat(value))), None)
        if same is not None:
            what = said("hypothesis.stale", ranks=[rank], what=same.what)
            yield Tried(STALE, "fits", what, 0.0, (rank,), {"holds": {str(rank): same.what}})
            return
    yield Tried(STALE, "refuted", said("hypothesis.not_stale", count=_EARLIER), numbers={"compared": _EARLIER})


# ------------------------------------------------------------------------------------------------- against the other


def _of_shard(
    finding: Finding, name: Name, side: str, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> Finding:
    """A part of another rank in the weights: which blocks of the other side the activations equal."""
    tried = tuple(mapped(name, side, compared, traces))
    if not tried:
        return finding
    evidence = {**finding.evidence, "hypotheses": [one.to_dict() for one in tried]}
    fit = first_fit(tried)
    if fit is not None:
        parts = [finding.evidence["sentence"], fit.what]
        evidence |= told(said("list.semicolon", parts=parts))
    return replace(finding, evidence=evidence)


def _of_routed(finding: Finding, name: Name, traces: Mapping[str, Recorded]) -> Finding:
    """Routed experts that several ranks share: which side is wrong by its own records, and how."""
    found = wrong_side(name, traces)
    if found is None:
        return finding
    side, ranks, tried = found
    every = merged(tried)
    if len(ranks) < world_of(traces[side]):  # the others' rows are right, whoever's experts computed them
        every = tuple(replace(one, ranks=()) for one in every)
    return told_by(replace(finding, side=side, ranks=ranks), every)


def _of_sides(finding: Finding, name: Name, compared: TensorComparison, traces: Mapping[str, Recorded]) -> Finding:
    """A tensor that differs although its inputs agree, where a side has several ranks."""
    parallel = [side for side, trace in traces.items() if trace.structure is not None and trace.structure.tp > 1]
    if name.kind.name == SUMMED:
        return _of_routed(finding, name, traces)
    if not parallel:
        return finding
    side = accused(name, compared, parallel)
    trace = traces[side or parallel[0]]
    if trace.structure is None:
        return finding
    tried = [*mapped(name, side or parallel[0], compared, traces)]
    if not name.kind.shard or name.kind.name == "logits":
        tried += whole(name, side or parallel[0], trace.structure.tp, compared, traces)
    joined = {one: list(traces[one].ranks) for one in parallel} if name.kind.shard else {}
    evidence = {**finding.evidence, **({"joined_from_ranks": joined} if joined else {})}
    if first_fit(tried) is None:
        return replace(finding, evidence={**evidence, "hypotheses": [one.to_dict() for one in tried]})
    return told_by(replace(finding, side=side, ranks=tuple(trace.ranks), evidence=evidence), tried)
