"""Names of graph capture. The simulation runs eagerly; using any of them is an error that says so."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def _eager_only(what: str) -> Any:
    raise RuntimeError(f"simnpu: {what} needs graph capture, which is not simulated; launch the engine in eager mode")


class NPUGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        _eager_only("NPUGraph")


class graph:  # noqa: N801 - torch's name
    def __init__(self, *_: Any, **__: Any) -> None:
        _eager_only("torch.npu.graph")


class _GraphDispatchMode(TorchDispatchMode):
    """Exists to be patched by dlinfer at import."""


def graph_pool_handle() -> tuple[int, int]:
    return (0, 0)


def is_current_stream_capturing() -> bool:
    return False


def graph_task_group_begin(stream: Any) -> None:
    _eager_only("graph_task_group_begin")


def graph_task_group_end(stream: Any) -> None:
    _eager_only("graph_task_group_end")


def graph_task_update_begin(stream: Any, handle: Any) -> None:
    _eager_only("graph_task_update_begin")


def graph_task_update_end(stream: Any) -> None:
    _eager_only("graph_task_update_end")
