"""``align run --dry-run``: what a run would record and recompute, and what that takes; nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from adapters.base import Request, RowSpan
from adapters.probe.lean import RowChoice
from align.case.schema import Case
from align.checkpoints.table import Structure
from align.errors import EXIT_ALIGNED
from align.models.info import ModelInfo
from align.oracle.cost import Cost, capture_cost, cost_table, estimate, measured_rates
from align.run.flow import Wishes
from align.run.recording import default_values, rows_of
from align.walk.planner import least_values_for, shortest_telling, values_for

#: From the start to engines that take requests, both at once: 11 to 23 s with the presets on two cores.
LAUNCH_SECONDS = 20.0


def costs_of(case: Case, info: ModelInfo, structure: Structure, wishes: Wishes) -> list[Cost]:
    """Of one side: the recording that every run makes, the one of a request alone, and the float64 oracle."""
    requests = case.to_requests(info.eos_ids)
    rows = rows_of(requests)
    steps = max(request.max_new_tokens for request in requests)
    prefill = sum(len(request.token_ids) for request in requests)
    length = {request.name: len(request.token_ids) + request.max_new_tokens for request in requests}
    name = shortest_telling(tuple(length), length) if wishes.lean else max(length, key=length.__getitem__)
    shown = next(request for request in requests if request.name == name)
    values = wishes.values or (() if wishes.lean else default_values(structure, requests, wishes.budget))
    accused = f"layers.{structure.layers // 2}.mlp.down"
    closer = least_values_for(accused, structure) if wishes.lean else values_for(accused, structure)[0]
    own = len(shown.token_ids) + shown.max_new_tokens
    rates = measured_rates()
    common: dict[str, Any] = {"rates": rates}
    layer = [str(name) for name in structure.names() if name.layer == structure.layers // 2]
    own_steps: dict[str, Any] = {"steps": steps, "largest_step": len(shown.token_ids)}
    return [
        capture_cost(
            structure,
            case.dtype,
            rows,
            steps,
            requests=len(requests),
            values=values,
            largest_step=prefill,
            digested=_digested(requests) if wishes.lean else None,
            **common,
        ),
        replace(
            capture_cost(
                structure,
                case.dtype,
                own,
                values=closer,
                digested=_digested([shown]) if wishes.lean else None,
                **own_steps,
                **common,
            ),
            what=f"capture, {'one' if wishes.lean else 'the longest'} request alone with "
            f"{'an operator' if wishes.lean else 'a layer'}'s values",
        ),
        replace(
            estimate(structure, case.dtype, own, steps, span=own, names=layer, **common),
            what="oracle, one layer of that request",
        ),
        estimate(structure, case.dtype, rows, steps, requests=len(requests), span=own, **common),
    ]


def _in_all(costs: Sequence[Cost]) -> str:
    """What a run takes altogether, as far as it can be told before it."""
    recording, *closer = (cost.seconds for cost in costs[:-1])
    clean, wrong = LAUNCH_SECONDS + recording, LAUNCH_SECONDS + recording + sum(closer)
    return (
        f"in all about {clean:.0f} s, and {wrong:.0f} s where something is wrong: launching both engines takes about "
        f"{LAUNCH_SECONDS:.0f} s of it on the simulated NPU (longer for large weights); the engines' own steps come on "
        "top, and the last row is not counted"
    )


def _digested(requests: Sequence[Request]) -> int:
    """Rows whose digests a lean recording keeps."""
    choice, count = RowChoice(), 0
    for request in requests:
        length = len(request.token_ids)
        spans = [RowSpan(request.name, 0, length)]
        spans += [RowSpan(request.name, length + step, 1) for step in range(request.max_new_tokens - 1)]
        count += sum(len(choice.choose([span])) for span in spans)
    return count


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
        costs = costs_of(case, info, structure, wishes)
        console.print(cost_table(costs), markup=False, highlight=False, soft_wrap=True)
        console.print(_in_all(costs), markup=False, highlight=False, soft_wrap=True)
    console.print("nothing was started (--dry-run)")
    return EXIT_ALIGNED
