"""``align run --dry-run``: what a run would record and recompute, and what that takes; nothing is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from align.case.schema import Case
from align.checkpoints.table import Structure
from align.errors import EXIT_ALIGNED
from align.models.info import ModelInfo
from align.oracle.cost import Cost, capture_cost, cost_table, estimate, measured_rates
from align.run.flow import Wishes
from align.run.recording import default_values, rows_of
from align.walk.planner import values_for


def costs_of(case: Case, info: ModelInfo, structure: Structure, wishes: Wishes) -> list[Cost]:
    """Of one side: the recording that every run makes, the one of a request alone, and the float64 oracle."""
    requests = case.to_requests(info.eos_ids)
    rows = rows_of(requests)
    steps = max(request.max_new_tokens for request in requests)
    prefill = sum(len(request.token_ids) for request in requests)
    shown = max(requests, key=lambda request: len(request.token_ids))
    values = wishes.values or default_values(structure, requests, wishes.budget)
    accused = f"layers.{structure.layers // 2}.mlp.down"
    closer, _ = values_for(accused, structure)
    own = len(shown.token_ids) + shown.max_new_tokens
    rates = measured_rates()
    common: dict[str, Any] = {"rates": rates}
    layer = [str(name) for name in structure.names() if name.layer == structure.layers // 2]
    own_steps: dict[str, Any] = {"steps": steps, "largest_step": len(shown.token_ids)}
    return [
        capture_cost(
            structure, case.dtype, rows, steps, requests=len(requests), values=values, largest_step=prefill, **common
        ),
        replace(
            capture_cost(structure, case.dtype, own, values=closer, **own_steps, **common),
            what="capture, the longest request alone with a layer's values",
        ),
        replace(
            estimate(structure, case.dtype, own, steps, span=own, names=layer, **common),
            what="oracle, one layer of that request",
        ),
        estimate(structure, case.dtype, rows, steps, requests=len(requests), span=own, **common),
    ]


def show(console: Console, case: Case, info: ModelInfo, structure: Structure | None, wishes: Wishes) -> int:
    """Print it, and return the exit code."""
    requests, layout = case.requests, case.layout.to_layout()
    console.print(
        f"{info.name}: {info.layers} layers, {case.dtype}, {layout}, {len(requests)} requests; the candidate is "
        f"{case.candidate}, the reference {case.reference}",
        markup=False,
        highlight=False,
    )
    if structure is None:
        console.print("tokens alone: nothing is recorded")
    else:
        console.print(
            "per side; sizes follow from shapes, memory and time are estimates for this machine's arithmetic:"
        )
        console.print(
            cost_table(costs_of(case, info, structure, wishes)), markup=False, highlight=False, soft_wrap=True
        )
    console.print("nothing was started (--dry-run)")
    return EXIT_ALIGNED
