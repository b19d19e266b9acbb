"""Findings of path C say which functions of the accused side talk to other ranks, with their live lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from align.collectives.begin import place_of, way_of
from align.compare.rows import Recorded
from align.findings import Finding

#: Name of the workers' observation, see :mod:`adapters.probe.parallel_code`.
FACT = "parallel_code"
_WHAT = "distributed code"
_EXCHANGE = "exchange of experts' rows"
#: Functions and files of mixtures of experts; engines load them whether a model has experts or not.
_EXPERTS = re.compile(r"moe|expert", re.IGNORECASE)


def with_parallel_code(findings: Sequence[Finding], traces: Mapping[str, Recorded]) -> list[Finding]:
    """The findings; those of path C have more to read in ``evidence["read"]``, of the accused side or of both."""
    places = {side: _places(trace) for side, trace in traces.items()}
    return [_with_places(one, places) if one.path == "C" else one for one in findings]


def _with_places(finding: Finding, places: Mapping[str, list[str]]) -> Finding:
    read: dict[str, list[dict[str, str]]] = {
        side: list(entries) for side, entries in (finding.evidence.get("read") or {}).items()
    }
    for side, found in places.items():
        if found and finding.side in (side, None):
            read[side] = [*read.get(side, []), *({"what": _WHAT, "place": place} for place in _about(finding, found))]
    call = finding.evidence.get("collective")
    if way_of(finding) is not None and finding.side is not None and call and (place := place_of(call)):
        read[finding.side] = [{"what": _EXCHANGE, "place": place}, *read.get(finding.side, [])]
    read = {side: entries for side, entries in read.items() if entries}
    return replace(finding, evidence={**finding.evidence, "read": read}) if read else finding


def _about(finding: Finding, places: Sequence[str]) -> list[str]:
    """Those of functions that may be about it: where experts exchange rows no other collective is to blame."""
    way = way_of(finding)
    if way is None:
        return list(places)
    return [one for one in places if any(operation in one.rpartition(" ")[2] for operation in way.operations)]


def _places(trace: Recorded) -> list[str]:
    """Of a model without experts none of experts: nothing of them runs there."""
    told = trace.manifest.get("observations", ())
    found = [one for one in told if one.get("name") == FACT and one.get("value")]
    places = [str(place) for place in found[-1]["value"]] if found else []
    dense = trace.structure is not None and not trace.structure.experts
    return [place for place in places if not (dense and _EXPERTS.search(place))]
