"""The two numerics of the simulated operators.

`fp32-internal` computes in float32 inside one operator and rounds once, at its end. `native` works in the
tensors' own dtype with the operation order of transformers' eager code. Neither is a claim about a real NPU's
kernels: legitimate kernels differ by about as much, which makes the pair a source of clean noise to calibrate
on.
"""

from __future__ import annotations

import os

import torch

ENVIRONMENT_NAME = "ALIGN_SIMNPU_NUMERICS"
NATIVE = "native"
FP32_INTERNAL = "fp32-internal"
CHOICES = (NATIVE, FP32_INTERNAL)


def _validated(name: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"{ENVIRONMENT_NAME}={name!r} is not a numerics; set it to '{NATIVE}' or '{FP32_INTERNAL}'")
    return name


_current = _validated(os.environ.get(ENVIRONMENT_NAME, FP32_INTERNAL))


def numerics() -> str:
    """Return the numerics in force: `native` or `fp32-internal`."""
    return _current


def set_numerics(name: str) -> str:
    """Switch the numerics of this process and return the one that was in force.

    Raises ValueError for a name that is not one of `CHOICES`.
    """
    global _current
    previous = _current
    _current = _validated(name)
    return previous


def is_native() -> bool:
    """Say whether operators work in the tensors' own dtype."""
    return _current == NATIVE


def internal(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in the dtype that an operator computes in: its own (`native`) or float32
    (`fp32-internal`).
    """
    return tensor if _current == NATIVE else tensor.float()
