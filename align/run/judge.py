"""From two traces to findings; a joint run and ``align compare`` judge alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from align.calibrate.choose import NONE, choose_floor
from align.collectives.apart import copies_of, copies_unseen, ranks_apart
from align.collectives.audit import Audited, with_records
from align.collectives.explain import explained
from align.compare.calls import with_calls
from align.compare.coverage import percent_text
from align.compare.excused import behind_routers
from align.compare.flips import with_flips
from align.compare.floor import FloorRule
from align.compare.host import host_fallbacks
from align.compare.indices import of_ledger
from align.compare.locate import locate
from align.compare.parallel_code import with_parallel_code
from align.compare.policy import TensorPolicy
from align.compare.rows import Recorded
from align.compare.sent import sent_notes
from align.compare.sites import sites_of
from align.compare.tensors import TensorComparison, compare_traces
from align.compare.tokens import TokenComparison
from align.errors import UserError
from align.findings import Finding
from align.run.verdict import Verdict, tokens_verdict
from align.walk.phases import phases_of, with_stages

#: Percent of the checkpoints that a comparison demands unless told otherwise.
DEFAULT_COVERAGE = 100.0
_SHOWN_MISSING = 3


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: tensors are many and small, and threads that wait for each other on a busy machine make
    a comparison of seconds take minutes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def policy_for(reference: Recorded, name: Literal["derived", "seed"], floor: FloorRule | None = None) -> TensorPolicy:
    """The thresholds for the reference's model; a floor narrows derived ones alone."""
    config: Mapping[str, Any] = reference.manifest.get("model") or {}
    layers = int(config.get("num_hidden_layers") or 1)
    make = TensorPolicy.derived if name == "derived" else TensorPolicy.seed
    policy = make(reference.dtype, layers, quantised=bool(config.get("quantization_config")))
    return policy if floor is None or name != "derived" else replace(policy, floor=floor)


def judge_tensors(
    candidate: Recorded,
    reference: Recorded,
    policy: Literal["derived", "seed"],
    comparisons: Mapping[str, TokenComparison],
    progress: Callable[[str], None] | None = None,
    floor: str = NONE,
    ledger: Sequence[Finding] = (),
    collectives: Mapping[str, Audited] | None = None,
) -> tuple[TensorComparison, tuple[Finding, ...]]:
    """Compare two traces and say what is wrong, the headline first.

    Args:
        comparisons: of the tokens, by mode; empty if there are none.
        progress: hears where the comparison is.
        floor: see :func:`align.calibrate.choose.choose_floor`.
        ledger: path A of both sides, see :func:`align.run.audit.index_faults`.
        collectives: by side, see :func:`align.run.collectives.audit_collectives`.

    Raises:
        UserError: a trace cannot be read at all, nothing in it can be compared, or the floor is not one for them.
    """

    def at(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress(f"{done}/{total} {name}")

    rule = choose_floor(floor, candidate.manifest, reference.manifest) if policy == "derived" else None
    try:
        with one_thread():
            compared = compare_traces(candidate, reference, policy_for(reference, policy, rule), at)
    except ValueError as error:
        raise UserError(f"the traces cannot be compared: {error}", "record them again: align capture") from error
    if not any(one.compared for one in compared.checkpoints):
        why = next((one.why for one in compared.checkpoints), "nothing was recorded")
        raise UserError(
            f"no tensor is on both sides: {why}",
            "record both sides with one case: align run, or align capture twice; name .pt files alike",
        )
    audits = {"candidate": candidate.manifest.get("weights", ()), "reference": reference.manifest.get("weights", ())}
    differ = bool(comparisons) and tokens_verdict(behind_routers(comparisons, compared.flipped)) == "diverged"
    traces = {"candidate": candidate, "reference": reference}
    affected, unaffected, information = host_fallbacks(compared, traces)
    with one_thread():
        copies = copies_of(traces)
        apart = ranks_apart(copies, compared, traces)
        located = explained(locate(compared, audits, differ, ledger, apart), compared, traces)
        groups = {side: int(getattr(trace, "groups", 1)) for side, trace in traces.items()}  # files have none
        located = with_records(located, collectives or {}, groups)
    inputs = [one for one in located if one.path == "INPUT"]  # these explain everything
    findings = [*inputs, *affected, *(one for one in located if one.path != "INPUT"), *unaffected]
    notes = (*compared.notes, *information, *copies_unseen(copies), *sent_notes(traces))
    compared = replace(compared, notes=notes, sites=sites_of(traces))
    told = tuple(with_flips(with_parallel_code(with_calls(findings, traces), traces), compared))
    return compared, tuple(_with_phases(told, compared, traces))


def _with_phases(
    findings: Sequence[Finding], compared: TensorComparison, sides: Mapping[str, Recorded]
) -> Iterator[Finding]:
    """The first finding that names a checkpoint says in which stage it begins: that decides where to look on."""
    told = compared.pairing.by_order
    for finding in findings:
        if of_ledger(finding):
            yield with_stages(finding, sides["reference"])
            continue
        if told or finding.checkpoint is None:
            yield finding
            continue
        told = True
        try:
            with one_thread():
                phases = phases_of(finding.checkpoint, finding.side, sides, compared).to_dict()
        except ValueError as error:  # the comparison has told what is damaged
            phases = {"states": {}, "onset": None, "why": str(error)}
        yield replace(finding, evidence={**finding.evidence, "phases": phases})


def coverage_demanded(percent: float) -> float:
    """``--min-coverage``, if it is one.

    Raises:
        UserError: not within 0 to 100.
    """
    if not 0.0 <= percent <= 100.0:  # nor NaN
        raise UserError(
            f"--min-coverage {percent:g} is no percentage", "give a number from 0 to 100, for example --min-coverage 95"
        )
    return percent


def refuse_uncovered(verdict: Verdict, tensors: TensorComparison | None, demanded: float | None) -> None:
    """Stop where nothing was found wrong because too little was looked at.

    Args:
        verdict: what was compared says. What was found wrong stays wrong, whatever was not looked at.
        demanded: percent that each side, and what was compared, must reach; ``None`` demands nothing.

    Raises:
        UserError: less was covered; names what is missing and why.
    """
    if verdict != "aligned" or tensors is None or demanded is None:
        return
    if all(coverage.reaches(demanded) for coverage in tensors.coverage.values()):
        return
    numbers = ", ".join(
        f"{part} {percent_text(coverage.percent)} % of {coverage.expected}"
        for part, coverage in tensors.coverage.items()
    )
    reasons = _not_covered(tensors)
    shown = ", ".join(f"{name} ({why})" for name, why in list(reasons.items())[:_SHOWN_MISSING])
    more = "" if len(reasons) <= _SHOWN_MISSING else f" and {len(reasons) - _SHOWN_MISSING} more"
    raise UserError(
        f"not comparable: nothing was found wrong, but the coverage is below the demanded {demanded:g} % of the "
        f"checkpoints ({numbers}): {shown}{more}",
        f"{_mend(tensors, demanded)}; or accept it: --min-coverage "
        f"{percent_text(min(coverage.percent for coverage in tensors.coverage.values()))}",
    )


def _not_covered(tensors: TensorComparison) -> dict[str, str]:
    """Names that were not compared, or not recorded everywhere by a side, with the reason, in order."""
    found: dict[str, str] = {}
    for part in ("paired", "candidate", "reference"):
        coverage = tensors.coverage[part]
        given = dict(coverage.why)
        for name in coverage.lacking:
            where = "not recorded" if name in coverage.missing else "not recorded in every step and rank"
            found.setdefault(name, given.get(name, where if part == "paired" else f"{where} by the {part}"))
    return {one.name: found[one.name] for one in tensors.checkpoints if one.name in found}


def _mend(tensors: TensorComparison, demanded: float) -> str:
    short = [side for side in ("candidate", "reference") if not tensors.coverage[side].reaches(demanded)]
    if short:
        return (
            f"record them on the {' and the '.join(short)}: `align taps ENGINE` lists where the engine yields each "
            "checkpoint, its log says what was not found there, and --capture '*' keeps values instead of digests"
        )
    return "record the values of both sides again: --values-budget MB, or --capture '*'"
