"""Mirrors torch_npu.profiler.dynamic_profile: never started, so every call has nothing to do."""

from __future__ import annotations


def init(path: str) -> None:
    raise RuntimeError("simnpu: dynamic profiling is not simulated; unset the profiler configuration of the engine")


def step() -> None:
    """No profile is running."""


def start(path: str | None = None) -> None:
    init(path or "")
