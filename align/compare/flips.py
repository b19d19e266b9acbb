"""What a router that is wrong by little does: near-ties that flip, counted in the finding that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from align.checkpoints.table import parse
from align.compare.routes import LOGITS
from align.compare.tensors import TensorComparison
from align.findings import Finding
from align.sentences import said


def with_flips(findings: Iterable[Finding], compared: TensorComparison) -> Iterator[Finding]:
    """Findings at a router's logits say how many choices flip from their layer on, and how far.

    A router gate in lower precision moves its logits by no more than they are rounded; what it does shows in the number
    of tokens that change their experts (vllm-ascend #9617: 27 to 38 of 1000).
    """
    for finding in findings:
        flips = [] if finding.layer is None else [one for one in compared.flips if one.layer >= finding.layer]
        if finding.checkpoint is None or parse(finding.checkpoint).kind.name != LOGITS or compared.routing is None:
            yield finding
            continue
        words = said(
            "router.precision",
            flips=len(flips),
            swing=max((one.swing for one in flips), default=0.0),
            noise=max((one.noise for one in flips), default=0.0),
            reached=compared.routing.reached,
            rows=compared.routing.rows,
        )
        yield replace(finding, evidence={**finding.evidence, "flips": {"count": len(flips), "told": words}})
