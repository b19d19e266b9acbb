"""Mirrors the profiler names that engines import; profiling itself is torch's, of the CPU."""

from __future__ import annotations

from typing import Any

from torch.profiler import profile, schedule, tensorboard_trace_handler

from torch_npu.profiler import dynamic_profile

__all__ = [
    "AiCMetrics", "ExportType", "ProfilerActivity", "ProfilerLevel", "dynamic_profile", "profile", "schedule",
    "tensorboard_trace_handler",
]  # fmt: skip


class ProfilerActivity:
    from torch.profiler import ProfilerActivity as _Torch

    CPU = _Torch.CPU
    NPU = _Torch.CPU


class _Name:
    """An enumeration whose members are only handed back to the profiler."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


AiCMetrics: Any = _Name()
ExportType: Any = _Name()
ProfilerLevel: Any = _Name()


def _ExperimentalConfig(**options: Any) -> dict[str, Any]:  # noqa: N802 - the vendor's name
    return options
