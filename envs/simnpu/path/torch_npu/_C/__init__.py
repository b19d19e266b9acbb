"""Mirrors the compiled module's names that engines use."""

from __future__ import annotations

import torch


class _NPUTaskGroupHandle:
    """Only named in annotations; task groups belong to graph capture."""


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
