"""From two results to the section ``paired`` of the later one. The rule is :mod:`align.walk.paired`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from align.result.paired import Confounded, Paired, PairedFault
from align.result.parts import Condition, Finding, Measure
from align.result.schema import CaseSummary, Result
from align.sentences import Said, raw, said, text_of
from align.walk.paired import Confounder, Fault, Pair, Ran, Tried, pair

#: Ids by request that a recording follows.
Followed = Mapping[str, Sequence[int]]
#: Names that a sentence lists.
_LISTED = 4
#: The paths that have a letter; the others have a word of their own.
_WORDS = {"UNLOCATED": "not located", "INPUT": "inputs", "FA": "FlashAttention arguments", "QUANT": "quantisation"}


@dataclass(frozen=True)
class Asked:
    """How a run was asked for; its result alone does not tell.

    Attributes:
        followed: what its recording followed; ``None`` if that is not known.
        tensors: whether there was to be a recording at all; ``None`` if that is not known.
    """

    followed: Followed | None = None
    tensors: bool | None = None


@dataclass(frozen=True)
class Earlier:
    """The run that is repeated.

    Attributes:
        name: of its directory.
        result: ``None`` if it left none that can be read.
        why: why there is none.
        asked: how it was asked for.
    """

    name: str
    result: Result | None = None
    why: Said | None = None
    asked: Asked = Asked()


def paired_with(earlier: Earlier, now: Result, asked: Asked = Asked()) -> Paired:
    """What a run says together with an earlier one.

    Args:
        asked: how ``now`` was asked for.
    """
    before = Ran("not comparable") if earlier.result is None else ran_of(earlier.result)
    found = pair(before, ran_of(now))
    measures = dict(_measures(now))
    if earlier.result is None:  # nothing is known of it
        found = replace(found, added=(), removed=(), changes=0)
    else:
        measures |= dict(_measures(earlier.result))
        found = replace(found, confounded=(*found.confounded, *_asked_otherwise(earlier.asked, asked)))
    told = sentence(earlier, before, now, found)
    return Paired(
        earlier=earlier.name,
        verdict="not comparable" if earlier.result is None else earlier.result.verdict,
        why=text_of(_reason(earlier)) if before.verdict == "not comparable" else "",
        headline=None if before.headline is None else _fault(before.headline),
        added=[measures[one] for one in found.added],
        removed=[measures[one] for one in found.removed],
        changes=found.changes,
        confounded=[Confounded.model_validate(asdict(one)) for one in found.confounded],
        outcome=found.outcome,
        conclusive=found.conclusive,
        gone=[_fault(one) for one in found.gone],
        appeared=[_fault(one) for one in found.appeared],
        what=text_of(told),
        told=told,
    )


# ---------------------------------------------------------------------------------------------------- what is compared


def ran_of(result: Result) -> Ran:
    """What the rule looks at."""
    fitted = None if result.diagnosis is None else result.diagnosis.fault
    return Ran(
        verdict=result.verdict,
        faults=tuple(
            _accused(finding, fitted if number == 0 else None) for number, finding in enumerate(result.findings)
        ),
        tried=tuple(tried for tried, _ in _measures(result)),
        controls=_controls(result),
        effects=frozenset(("condition", one.name) for one in result.conditions if one.told or _unreached(one, result)),
    )


def _unreached(condition: Condition, result: Result) -> bool:
    """Some are read from the recording, which a run that ends before it does not have."""
    return condition.verdict == "unknown" and result.tensors is None


def _accused(finding: Finding, fitted: str | None) -> Fault:
    index = finding.evidence.get("fault")
    return Fault(finding.path, finding.kind, finding.side, finding.checkpoint, str(index) if index else fitted)


def _fault(fault: Fault) -> PairedFault:
    return PairedFault.model_validate(asdict(fault))


def _measures(result: Result) -> list[tuple[Tried, Measure]]:
    """A patch by the name of its file, which its docstring need not say."""
    files = {side: iter(paths) for side, paths in result.environment.patches.items()}
    found = []
    for one in result.measures:
        if one.kind == "patch":
            name, value = PurePath(next(files.get(one.side, iter(())), one.file)).name, one.sha256
        else:
            name, value = one.file, json.dumps(one.value, sort_keys=True, ensure_ascii=False)
        found.append((Tried(one.side, one.kind, name, value), one))
    return found


def _controls(result: Result) -> dict[str, dict[str, str | None]]:
    """All that should be alike; groups that the run did not reach are absent."""
    hardware = next((one for one in result.facts if one.name == "hardware"), None)
    groups: dict[str, dict[str, str | None]] = {
        "version": {f"{side} {name}": text for side, all_ in result.versions.items() for name, text in all_.items()},
        "case": {} if result.case is None else _case(result.case),
        "model": {} if result.case is None else {"fingerprint": result.case.fingerprint},
        "device": {} if hardware is None or hardware.value is None else {"hardware": hardware.value},
        "condition": {one.name: f"{one.verdict}{', allowed' if one.allowed else ''}" for one in result.conditions},
        "recording": _recording(result),
    }
    return {what: found for what, found in groups.items() if found}


def _case(case: CaseSummary) -> dict[str, str | None]:
    """What differs by name, and what has no name by the hash of the whole."""
    plain = case.model_dump(mode="json", exclude={"fingerprint", "sha256"})
    return {**{name: json.dumps(value, sort_keys=True) for name, value in plain.items()}, "sha256": case.sha256}


def _recording(result: Result) -> dict[str, str | None]:
    """By what tensors were judged. A fault may end a run before they are."""
    if result.tensors is None:
        return {}
    floor = result.tensors.floor
    audits = {side: "audited" if one.observable else "not observable" for side, one in result.ledger.items()}
    return {
        "policy": result.tensors.policy,
        "floor": None if floor is None else floor.name,
        **{f"indices of the {side}": state for side, state in audits.items()},
    }


def _asked_otherwise(before: Asked, after: Asked) -> Iterator[Confounder]:
    """Recorded or not, and the first request along whose tokens the two runs part."""
    if None not in (before.tensors, after.tensors) and before.tensors != after.tensors:
        one, other = ("compared" if some.tensors else "not compared" for some in (before, after))
        yield Confounder("recording", "tensors", one, other)
    for request, ids in (after.followed or {}).items():
        was = (before.followed or {}).get(request, ids)
        if list(was) != list(ids):
            parted = (at for at, (mine, theirs) in enumerate(zip(was, ids, strict=False)) if mine != theirs)
            at = next(parted, min(len(was), len(ids)))
            one, other = (f"token {at}: {some[at] if at < len(some) else 'none'}" for some in (was, ids))
            yield Confounder("tokens", request, one, other)
            return


# ------------------------------------------------------------------------------------------------------------- in words


def sentence(earlier: Earlier, before: Ran, now: Result, found: Pair) -> Said:
    """All of it in one sentence."""
    given: dict[str, Any] = {"earlier": earlier.name, "change": _change(found), "doubt": _doubt(found)}
    after = ran_of(now).headline
    faults = {name: fault_said(one) for name, one in (("before", before.headline), ("after", after))}
    if found.outcome == "unknown":
        if before.verdict == "not comparable":
            return said("paired.unknown_before", earlier=earlier.name, why=_reason(earlier))
        return said("paired.unknown_now", earlier=earlier.name, why=now.reason_told or raw(now.reason))
    if found.outcome == "moved":
        gone = before.headline in found.gone
        return said("paired.moved", **given, **faults) if gone else said("paired.behind", **given, **faults)
    if found.outcome == "mended":
        return said("paired.mended", **given, before=faults["before"])
    if found.outcome == "not mended":
        return said("paired.not_mended", **given, before=faults["before"])
    return said("paired.same", **given) if found.outcome == "same" else said("paired.broken", **given, **faults)


def fault_said(fault: Fault | PairedFault | None) -> Said:
    """A fault without its numbers."""
    if fault is None:
        return said("paired.tokens")
    path = f"path {fault.path}" if len(fault.path) == 1 else _WORDS.get(fault.path, "environment")
    return said(
        "paired.fault",
        path=path,
        kind=fault.kind,
        side="" if fault.side is None else said("paired.of", side=fault.side),
        place="" if fault.checkpoint is None else said("paired.at", checkpoint=fault.checkpoint),
        fault="" if fault.fault is None else said("paired.which", fault=fault.fault),
    )


def _reason(earlier: Earlier) -> Said:
    if earlier.result is None:
        return earlier.why or said("paired.no_result")
    return earlier.result.reason_told or raw(earlier.result.reason)


def _change(found: Pair) -> Said:
    """What was changed in between."""
    taken = {one.variable for one in found.removed}
    added = {one.variable for one in found.added}
    parts = [
        said("paired.other", what=_tried(one)) if one.variable in taken else _tried(one) for one in found.added
    ] + [said("paired.without", what=_tried(one)) for one in found.removed if one.variable not in added]
    return said("paired.changed", parts=parts) if parts else said("paired.unchanged")


def _tried(one: Tried) -> Said:
    if one.kind == "patch":
        return said("measured.patch", side=one.side, names=[one.name])
    return said("measured.option", side=one.side, names=[one.name])


def _doubt(found: Pair) -> Said | str:
    """Why the outcome cannot be put down to what was changed; empty if it can."""
    reasons = []
    if found.changes > 1:
        reasons.append(said("paired.several", count=found.changes))
    if found.unsteady:
        reasons.append(said("paired.unsteady"))
    if found.confounded:
        names = [said("paired.name", what=one.what, name=one.name) for one in found.confounded[:_LISTED]]
        rest = len(found.confounded) - _LISTED
        names += [said("paired.more", count=rest)] if rest > 0 else []
        reasons.append(said("paired.besides", names=names))
    return said("paired.doubt", reasons=reasons) if reasons else ""
