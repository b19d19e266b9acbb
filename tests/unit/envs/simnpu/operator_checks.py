"""ATen operators on the npu device against the CPU; run by test_device.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.unit.envs.simnpu.operators import DECOMPOSED, OPERATORS, make

Tensor = torch.Tensor


def same(ours: Any, theirs: Any) -> bool:
    """Bit-equal, with NaN equal to NaN, also inside of tuples."""
    if isinstance(theirs, (tuple, list)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    if not isinstance(theirs, Tensor):
        return bool(ours == theirs)
    assert ours.device.type == "npu", "the result left the device"
    host = ours.cpu()
    if host.dtype != theirs.dtype or host.shape != theirs.shape:
        return False
    return torch.equal(host.nan_to_num(1e30), theirs.nan_to_num(1e30)) and torch.equal(host != host, theirs != theirs)


def close(ours: Any, theirs: Any) -> bool:
    """Equal but for the order of float32 sums."""
    if isinstance(theirs, tuple):
        return all(close(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours.device.type == "npu" and torch.allclose(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


def _operator(name: str) -> None:
    function, inputs = OPERATORS[name]
    alike = close if name in DECOMPOSED else same
    for seed in range(3):
        given_host = [make(text, 10 * seed + at) for at, text in enumerate(inputs)]
        given_there = [tensor.to("npu") for tensor in given_host]
        expected = function(*given_host)
        result = function(*given_there)
        assert alike(result, expected), f"seed {seed}: {result} is not {expected}"
        assert all(same(ours, theirs) for ours, theirs in zip(given_there, given_host, strict=True)), "inputs differ"


def more() -> dict[str, Callable[[], None]]:
    """One check per operator."""
    return {name: lambda name=name: _operator(name) for name in OPERATORS}  # type: ignore[misc]
