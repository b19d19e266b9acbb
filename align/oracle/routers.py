"""Judges which experts a router chose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from align.checkpoints.bounds import bounds
from align.compare.residual import ResidualPolicy, place
from align.oracle.operators import Operators
from align.oracle.plan import Task
from align.oracle.rows import StepRows
from align.oracle.types import Cell, OracleResult, Profile, Skipped


def judge_choice(
    task: Task,
    parts: Sequence[StepRows],
    operators: Operators,
    dtype: torch.dtype,
    policy: ResidualPolicy,
    skipped: Sequence[Skipped],
) -> OracleResult:
    """A choice is a set: within if no expert that was left out beats a chosen one by more than rounding allows.

    ``bit_equal`` says that every choice is the best by float64.
    """
    logits = torch.cat([part.inputs[0] for part in parts])
    ids = torch.cat([part.output for part in parts if part.output is not None])
    excess = operators.choice(task, logits, ids, dtype)
    places = tuple(one for part in parts for one in part.places)
    allowed = policy.operators.get(task.operator, bounds()[task.operator]).max_roundings * policy.slack
    ratio = excess.amax(1) / allowed
    row = int(ratio.argmax())
    column = int(excess[row].argmax())
    peak, expert = float(excess[row, column]), int(ids[row, column])
    at = places[row]
    beyond = peak > allowed
    why = (
        f"expert {expert} was chosen for {place((at.request, at.position))}, and one that was left out beats it by "
        f"{peak:.3g} roundings; {allowed:.3g} are possible"
    )
    nothing = torch.full_like(ratio, torch.nan)
    return OracleResult(
        name=str(task.name),
        operator=task.operator,
        verdict="beyond" if beyond else "within",
        why=why if beyond else "",
        rows=len(ids),
        skipped=tuple(skipped),
        ratio=peak / allowed,
        roundings=peak,
        allowed=allowed,
        worst=Cell(at, column, -1, float(expert), torch.nan, torch.nan),
        bit_equal=bool((excess == 0).all()),
        equal=float((excess == 0).all(1).double().mean()),
        places=places,
        tokens=Profile(ratio, nothing, nothing),
    )
