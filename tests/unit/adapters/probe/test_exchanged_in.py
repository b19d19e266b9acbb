"""Where an exchange of tokens stands in a model."""

from __future__ import annotations

import pytest

from adapters.probe.collective_calls import exchanged_in


@pytest.mark.parametrize(
    ("operation", "inside", "where"),
    [
        ("all_to_all", ("layers.1.moe.out",), "layers.1.moe.routed"),  # vllm-ascend: between the tapped functions
        ("all_to_all", ("layers.1.moe.out", "layers.1.moe.routed"), "layers.1.moe.routed"),
        ("all_reduce", ("layers.1.moe.out",), "layers.1.moe.out"),  # the sum of routed and shared parts
        ("all_to_all", ("layers.1.attn.o",), "layers.1.attn.o"),
    ],
)
def test_tokens_are_exchanged_for_the_routed_experts(operation: str, inside: tuple[str, ...], where: str) -> None:
    assert exchanged_in(operation, inside)[-1] == where
    assert exchanged_in(operation, inside)[: len(inside)] == inside
    assert exchanged_in(operation, ()) == ()
