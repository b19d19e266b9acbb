"""A simulated ``torch_npu``: the real engines run their real Ascend code over it on a CPU.

torch loads this package at the end of ``import torch`` through its ``torch.backends`` entry point, exactly as it loads
the real one, so it is present in every process of an engine. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps it out.

Numbers computed here are simulated. They say nothing about the numerics of an NPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_npu._sim import device as _device
from torch_npu._sim import registry as _registry
from torch_npu._sim import settings as _settings

__version__ = "2.11.0"

#: Marks the simulation; hardware's torch_npu has no such attribute.
__simulated__ = True

_loaded = False


def _autoload() -> None:
    """Install device, operators, collectives and shims. Called by torch and on first import; idempotent."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from torch_npu import npu as npu_module
    from torch_npu._sim import distributed, shims

    _settings.load()
    _device.install(npu_module)
    sys.modules["torch.npu"] = npu_module
    _registry.install(_device)
    globals().update(_registry.python_attributes())
    distributed.install()
    shims.install()


class Format:
    """Storage formats by their number (ND keeps the plain layout; NZ tiles it in fractals of 16x16)."""

    UNDEFINED = -1
    NCHW = 0
    ND = 2
    FRACTAL_NZ = 29


def empty_with_format(
    size: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: Any = None,
    acl_format: int = Format.ND,
) -> torch.Tensor:
    """An uninitialised device tensor. The simulation keeps every format in plain layout."""
    return torch.empty(size, dtype=dtype, device=device or "npu")


def __getattr__(name: str) -> Any:
    if name.startswith(("npu_", "_npu_")):
        return _registry.missing(name)
    raise AttributeError(
        f"module 'torch_npu' (simulated) has no attribute {name!r}; "
        "add it under envs/simnpu/path/torch_npu if an engine needs it"
    )


_autoload()
