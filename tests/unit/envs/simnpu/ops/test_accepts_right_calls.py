"""Calls that the rules of ``align.fa`` call right are taken by the simulated operators, written without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import atb_attention, cache, flash_attention, fused_infer

from align.fa import Call, TensorFacts, rules
from align.fa.examples import bases, examples

Tensor = torch.Tensor
OPERATORS: dict[str, Callable[..., Any]] = {
    name: one
    for module in (atb_attention, cache, flash_attention, fused_infer)
    for name, one in vars(module).items()
    if callable(one) and "npu_" in name
}
JUDGED = ("ERROR", "WARN", "REMIND")
CALLS = {f"base {name}": call for name, call in bases().items()} | {
    one.id: examples()[one.id].passes for one in rules() if one.severity in JUDGED
}
SIMULATED = {name: call for name, call in CALLS.items() if call.operator in OPERATORS}


def live(facts: TensorFacts) -> Tensor:
    dtype = getattr(torch, facts.dtype)
    assert isinstance(dtype, torch.dtype)
    if facts.values is not None:
        return torch.tensor(facts.values, dtype=dtype).reshape(facts.shape)
    if facts.mask is None:
        return torch.ones(facts.shape, dtype=dtype)
    place = torch.arange(facts.shape[-1]) - torch.arange(facts.shape[-2])[:, None]
    shapes = {"causal": place > 0, "causal and diagonal": place >= 0, "none": place > facts.shape[-1]}
    if facts.mask.visible is not None:  # of each row its first columns
        shown = torch.tensor(facts.mask.visible)[:, None]
        shapes[facts.mask.pattern] = torch.arange(facts.shape[-1]) >= shown
    return shapes[facts.mask.pattern].expand(facts.shape).contiguous().to(dtype)


def run(call: Call) -> None:
    values = {name: live(one) if isinstance(one, TensorFacts) else one for name, one in call.arguments.items()}
    OPERATORS[call.operator](**{name: list(one) if isinstance(one, tuple) else one for name, one in values.items()})


def taken(call: Call) -> bool:
    """Whether it ran. What is not simulated (latent attention, quantisation, NZ) is no word about an argument."""
    try:
        run(call)
    except UnsimulatedOperator:
        return False
    return True


def test_most_are_simulated() -> None:
    assert len(SIMULATED) > 120
    assert sum(map(taken, SIMULATED.values())) > len(SIMULATED) * 0.6


@pytest.mark.parametrize("name", SIMULATED)
def test_a_right_call_is_taken_or_not_simulated(name: str) -> None:
    taken(SIMULATED[name])  # anything else that it raises is a refusal
