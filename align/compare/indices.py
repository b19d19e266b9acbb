"""Path A among the findings: what wrong cache indices explain, and where their findings stand.

The ledger of a side (:mod:`align.ledger`) tells more than the recorded slots alone; where it found something, that
stands for them. Its findings say whose attention was wrong from which layer and position on (``harmed``), and only
there is attention not at fault itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from align.compare.added import Added
from align.compare.checkpoint import CheckpointComparison
from align.compare.rows import CANDIDATE, REFERENCE, RowKey
from align.compare.tensors import TensorComparison
from align.findings import Finding, told
from align.sentences import said

#: How many names a finding lists in its evidence.
LISTED = 16
_EXPLAINED = "attn.out"


def of_ledger(finding: Finding) -> bool:
    """Whether the ledger found it, and not the comparison of the recorded slots."""
    return "harmed" in finding.evidence


def explains(finding: Finding) -> bool:
    """Whether anything that was recorded may be a consequence. What no attention read, or another run alone shows,
    explains nothing and must hide nothing."""
    return not of_ledger(finding) or bool(finding.evidence["harmed"])


def index_findings(comparison: TensorComparison, ledger: Sequence[Finding]) -> list[Finding]:
    """Of each side what its ledger found, or else what its recorded slots say."""
    found = list(ledger)
    known = {finding.side for finding in ledger if not finding.evidence["elsewhere"]}
    for side in (CANDIDATE, REFERENCE):
        wrong = [checkpoint for checkpoint in comparison.checkpoints if side in checkpoint.wrong_slots]
        if wrong and side not in known:
            found.append(_of_slots(side, wrong))
    return found


def _of_slots(side: str, wrong: Sequence[CheckpointComparison]) -> Finding:
    first = wrong[0]
    rows: tuple[RowKey, ...] = first.wrong_slots[side]
    others = [checkpoint.name for checkpoint in wrong[1:]]
    evidence: dict[str, Any] = {
        **told(
            said(
                "finding.slots",
                count=len(rows),
                rows=first.rows,
                request=rows[0].request,
                position=rows[0].position,
            )
        ),
        "rows_total": len(rows),
        "scope": {"requests": list(dict.fromkeys(row.request for row in rows))},
    }
    if others:
        evidence |= {"others": others[:LISTED], "others_total": len(others)}
    return Finding(
        "A",
        "slots",
        side=side,
        checkpoint=first.name,
        layer=first.layer,
        requests=tuple(dict.fromkeys(row.request for row in rows)),
        positions=tuple(row.position for row in rows[:LISTED]),
        evidence=evidence,
        next=f"see how the {side} computes kv_start_indices from its block table",
    )


def by_indices(side: str, checkpoint: CheckpointComparison, added: Added, indices: Sequence[Finding]) -> bool:
    """Attention that reads a wrong cache, or is handed wrong lengths, is not itself at fault: but only where that is.

    A request that no fault of an index reached, or a position before it did, leaves the operator accused.
    """
    layer = checkpoint.layer or 0
    mine = [finding for finding in indices if finding.side == side and explains(finding)]
    if checkpoint.kind != _EXPLAINED or not mine:
        return False
    if any(not of_ledger(finding) and (finding.layer or 0) <= layer for finding in mine):
        return True
    since: dict[str, int] = {}
    for finding in mine:
        for request, reach in (finding.evidence["harmed"] if of_ledger(finding) else {}).items():
            if reach["layer"] <= layer:
                since[request] = min(reach["position"], since.get(request, reach["position"]))
    if not since:
        return False
    for part in added.beyond:
        residual = part.residual
        worst = residual.row_name
        if not residual.requests and worst is None and not residual.rows_beyond:
            return False  # channels or heads alone show it: no row of the cache does that
        if any(request not in since for request in residual.requests):
            return False
        if worst is not None and (worst[0] not in since or worst[1] < since[worst[0]]):
            return False
    return True


def placed(findings: Sequence[Finding], indices: Sequence[Finding]) -> list[Finding]:
    """Findings with those of path A before what lies behind them: the inputs stay first, a fault of an earlier layer
    stays before. ``indices`` that explain nothing are left out: they come last, see :func:`explains`."""
    found = list(findings)
    inputs = sum(finding.path == "INPUT" for finding in found)
    for one in reversed([finding for finding in indices if explains(finding)]):
        behind = (
            at for at, other in enumerate(found) if at >= inputs and other.path != "A" and _layer(other) >= _layer(one)
        )
        found.insert(next(behind, len(found)), one)
    return found


def _layer(finding: Finding) -> float:
    """Of a finding; embedding comes before all layers, what else has none behind them."""
    if finding.layer is not None:
        return finding.layer
    return -1.0 if finding.checkpoint == "embed" else float("inf")
