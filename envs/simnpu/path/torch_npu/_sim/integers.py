"""ATen operators that an NPU computes for integers and a CPU does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """``torch.histc``, with counts in the dtype of ``tensor``; exact for integers below 2^53."""
    wide = tensor if tensor.is_floating_point() else tensor.double()
    counts: torch.Tensor = torch.ops.aten.histc.default(wide, bins, min, max)
    return counts.to(tensor.dtype)


#: What the device's fallback calls in place of the CPU's operator.
KERNELS: dict[Any, Callable[..., torch.Tensor]] = {torch.ops.aten.histc.default: histc}
