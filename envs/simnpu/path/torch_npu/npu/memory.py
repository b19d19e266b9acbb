"""Names of the pluggable allocator, which sleep mode uses; not simulated."""

from __future__ import annotations

from typing import Any


def _refuse(name: str) -> Any:
    raise RuntimeError(f"simnpu: torch.npu.memory.{name} is not simulated; launch the engine without sleep mode")


class NPUPluggableAllocator:
    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("NPUPluggableAllocator")


class MemPool:
    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("MemPool")


def use_mem_pool(*_: Any, **__: Any) -> Any:
    return _refuse("use_mem_pool")


def memory_snapshot(*_: Any, **__: Any) -> list[Any]:
    """No allocator history is kept."""
    return []
