"""A recomputed result and the size of what rounding may do to it."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor
#: Unit roundoff of the float32 arithmetic inside kernels.
SINGLE = 2.0**-24


class Exact(NamedTuple):
    """A recomputed result and its magnitude, both in the compute dtype and of the same shape."""

    value: Tensor
    magnitude: Tensor


def tiny(dtype: torch.dtype) -> float:
    """The smallest normal number of a dtype; below it the spacing no longer shrinks."""
    return float(torch.finfo(dtype).tiny)


def of_itself(value: Tensor, dtype: torch.dtype) -> Exact:
    """A result whose errors are relative to itself."""
    return Exact(value, value.abs().add_(tiny(dtype)))
