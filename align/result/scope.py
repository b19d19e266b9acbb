"""How far the trouble reaches: layers, requests, ranks."""

from __future__ import annotations

from collections.abc import Iterable

from align.checkpoints.table import parse
from align.result.parts import Scope
from align.run.report import Report


def scope_of(report: Report) -> Scope:
    """From the findings, the tokens that really differ, and the checkpoints that rounding does not explain."""
    origins: set[int] = set()
    for finding in report.findings:
        layers = [finding.layer, *finding.evidence.get("layers", ())]
        origins |= {layer for layer in layers if isinstance(layer, int)}
        origins |= layers_of(finding.evidence.get("others", ()))
    beyond = None
    if report.tensors is not None:
        beyond = [one.name for one in report.tensors.checkpoints if one.verdict == "beyond"]
    requests = [name for finding in report.findings for name in finding.requests]
    for comparison in report.comparisons.values():
        requests += [one.request for one in comparison.requests if one.outcome == "diverged"]
    return Scope(
        origin_layers=sorted(origins),
        reached_layers=sorted(layers_of(beyond or ())),
        checkpoints_beyond=None if beyond is None else len(beyond),
        phases=sorted({finding.phase for finding in report.findings if finding.phase is not None}),
        requests=list(dict.fromkeys(requests)),
        ranks=sorted({rank for finding in report.findings for rank in finding.ranks}),
    )


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
