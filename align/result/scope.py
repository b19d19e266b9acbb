"""How far the trouble reaches: layers, phases, requests, ranks, each of how many that were looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from align.checkpoints.table import parse
from align.findings import WORST_ALONE, Finding
from align.result.parts import Documented
from align.run.report import Report


class WorstPlace(Documented):
    """Where the headline is largest. It may reach much further."""

    checkpoint: str | None
    """Its checkpoint."""
    request: str
    """The request."""
    position: int
    """The token position, from 0."""


class Scope(Documented):
    """How far the trouble reaches. Empty lists mean none or not known, see the findings."""

    origin_layers: list[int] = Field(default_factory=list)
    """Layers where something goes wrong by itself."""
    reached_layers: list[int] = Field(default_factory=list)
    """Layers with a checkpoint that differs by more than rounding."""
    layers_of: int | None = None
    """Layers that were compared; null without tensors."""
    checkpoints_beyond: int | None = None
    """How many checkpoints differ by more than rounding; null without tensors."""
    phases: list[str] = Field(default_factory=list)
    """Phases (prefill, decode, mixed) that show a finding."""
    phases_of: list[str] = Field(default_factory=list)
    """Phases that were looked at for the headline; empty if that is not known."""
    requests: list[str] = Field(default_factory=list)
    """Requests that show a finding by themselves or whose tokens really differ."""
    requests_of: list[str] = Field(default_factory=list)
    """Requests that were compared."""
    ranks: list[int] = Field(default_factory=list)
    """Ranks that show a finding."""
    ranks_of: list[int] = Field(default_factory=list)
    """Ranks that were looked at for the headline; empty if that is not known."""
    rows: int | None = None
    """Rows that show the headline by themselves; null if rows were not judged one by one."""
    rows_of: int | None = None
    """Rows that were judged for it."""
    worst: WorstPlace | None = None
    """Where the headline is largest; null if it names no such place."""


def scope_of(report: Report) -> Scope:
    """From the findings, the tokens that really differ, and the checkpoints that rounding does not explain."""
    origins: set[int] = set()
    for finding in report.findings:
        layers = [finding.layer, *finding.evidence.get("layers", ())]
        origins |= {layer for layer in layers if isinstance(layer, int)}
        origins |= layers_of(finding.evidence.get("others", ()))
    beyond = compared = None
    if report.tensors is not None:
        beyond = [one.name for one in report.tensors.checkpoints if one.verdict == "beyond"]
        compared = {one.layer for one in report.tensors.checkpoints if one.compared and one.layer is not None}
    requests = [name for finding in report.findings for name in _seen(finding, "requests", finding.requests)]
    for comparison in report.comparisons.values():
        requests += [one.request for one in comparison.requests if one.outcome == "diverged"]
    ranks = {rank for finding in report.findings for rank in _seen(finding, "ranks", finding.ranks)}
    first = report.findings[0] if report.findings else None
    looked: dict[str, Any] = {} if first is None else first.evidence.get("scope") or {}
    return Scope(
        origin_layers=sorted(origins),
        reached_layers=sorted(layers_of(beyond or ())),
        layers_of=None if compared is None else len(compared),
        checkpoints_beyond=None if beyond is None else len(beyond),
        phases=sorted({phase for finding in report.findings for phase in _phases(finding)}),
        phases_of=list(looked.get("phases_of", ())),
        requests=list(dict.fromkeys(requests)),
        requests_of=_compared_requests(report),
        ranks=sorted(ranks),
        ranks_of=list(looked.get("ranks_of", ())),
        rows=looked.get("rows"),
        rows_of=looked.get("rows_of"),
        worst=None if first is None else _worst(first),
    )


def _seen(finding: Finding, what: str, otherwise: Iterable[Any]) -> list[Any]:
    """What a finding's evidence says was seen to be wrong, or else what the finding names."""
    return list((finding.evidence.get("scope") or {}).get(what) or otherwise)


def _phases(finding: Finding) -> list[str]:
    """Phases in which a finding shows, as far as that is known."""
    if finding.phase is not None:
        return [finding.phase]
    said = finding.evidence.get("phases")  # of a host fallback a list; of others the states of each stage
    return _seen(finding, "phases", said if isinstance(said, list) else ())


def _worst(finding: Finding) -> WorstPlace | None:
    if finding.kind not in WORST_ALONE or not finding.requests or not finding.positions:
        return None
    return WorstPlace(checkpoint=finding.checkpoint, request=finding.requests[0], position=finding.positions[0])


def _compared_requests(report: Report) -> list[str]:
    """Of the tensors' paired rows, or else of the tokens."""
    if report.tensors is not None and not report.tensors.pairing.by_order:
        names = dict.fromkeys(row.key.request for row in report.tensors.pairing.rows)
        if names:
            return sorted(names)
    return list(dict.fromkeys(one.request for found in report.comparisons.values() for one in found.requests))


def layers_of(names: Iterable[str]) -> set[int]:
    """Layers of the checkpoints, or of the checkpoint's tensors (``model.layers.3.…``), among the names."""
    found = set()
    for name in names:
        try:
            layer = parse(name.removeprefix("model.")).layer
        except ValueError:
            parts = name.split(".")
            at = parts.index("layers") + 1 if "layers" in parts else len(parts)
            layer = int(parts[at]) if at < len(parts) and parts[at].isdigit() else None
        if layer is not None:
            found.add(layer)
    return found
