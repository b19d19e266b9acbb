"""``torch.npu``: what the engines ask of the device beside operators.

Work is synchronous here, so streams and events only keep their interface and their order is the program's order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from torch_npu._sim import device as _device
from torch_npu._sim import settings as _settings
from torch_npu.npu import graphs, memory
from torch_npu.npu.graphs import (
    NPUGraph,
    graph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    is_current_stream_capturing,
)

__all__ = [
    "Event", "ExternalEvent", "NPUGraph", "Stream", "current_device", "current_stream", "default_stream", "device",
    "device_count", "empty_cache", "get_device_name", "get_device_properties", "get_soc_version", "graph",
    "graph_pool_handle", "graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin",
    "graph_task_update_end", "graphs", "is_available", "is_current_stream_capturing", "mem_get_info", "memory",
    "set_device", "set_stream", "stream", "synchronize",
]  # fmt: skip

_local = threading.local()


# ------------------------------------------------------------------------------------------------ streams, events


class Event:
    """A point in the program's order. Elapsed times are wall-clock, in milliseconds."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing is pending."""

    def reset(self, stream: Stream | None = None) -> None:
        self._time = None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""

    def elapsed_time(self, end_event: Event) -> float:
        if self._time is None or end_event._time is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end_event._time - self._time) * 1e3


ExternalEvent = Event


class Stream:
    """A queue that is always empty, because work runs when it is issued."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("npu", _index(device))
        self.priority = priority
        self.stream_id = id(self)
        self.npu_stream = self.cuda_stream = 0
        self._outer: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer.pop())


_default: Stream | None = None


def default_stream(device: Any = None) -> Stream:
    global _default
    if _default is None:
        _default = Stream()
    return _default


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", None) or default_stream()


def set_stream(stream: Stream) -> None:
    _local.stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    outer = getattr(_local, "stream", None)
    _local.stream = stream or outer
    try:
        yield
    finally:
        _local.stream = outer


def synchronize(device: Any = None) -> None:
    """Nothing is pending."""


# ------------------------------------------------------------------------------------------------------- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """The device needs no initialisation."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _settings.load().device_count


def current_device() -> int:
    index = _device.current_device().index
    assert index is not None
    return index


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    parsed = torch.device(device)
    if parsed.type == "cpu":
        raise ValueError(f"simnpu: expected an npu device, got {parsed}")
    index: Any = parsed.index
    return current_device() if index is None else int(index)


def set_device(device: Any) -> None:
    """Select the device of new tensors.

    Raises:
        RuntimeError: no such device.
        ValueError: the host is no such device.
    """
    _device.set_current_index(_index(device))


class device(contextlib.ContextDecorator):  # noqa: N801 - torch's name
    """Select a device for a while; ``None`` or a negative index changes nothing."""

    def __init__(self, device: Any = None) -> None:
        self._wanted = None if device is None or _index(device) < 0 else _index(device)
        self._outer: list[int] = []

    def __enter__(self) -> device:
        self._outer.append(current_device())
        if self._wanted is not None:
            set_device(self._wanted)
        return self

    def __exit__(self, *_: object) -> None:
        set_device(self._outer.pop())


def get_soc_version() -> int:
    return _settings.load().soc.version


def get_device_name(device: Any = None) -> str:
    return _settings.load().soc.device_name


def get_device_capability(device: Any = None) -> None:
    """Ascend devices have no compute capability; torch_npu answers None as well."""


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name=get_device_name(),
        total_memory=_settings.load().memory_bytes,
        major=0,
        minor=0,
        uuid=f"simnpu-{_index(device)}",
        multi_processor_count=24,
        cube_core_num=24,
        vector_core_num=48,
        L2_cache_size=192 << 20,
    )


# -------------------------------------------------------------------------------------------------------- memory


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes. Host memory is not rationed, so all of it is free."""
    total = _settings.load().memory_bytes
    return total, total


def memory_allocated(device: Any = None) -> int:
    return _device.allocated_bytes()


def max_memory_allocated(device: Any = None) -> int:
    return _device.allocated_bytes()


memory_reserved = memory_allocated
max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    stats["allocated_bytes.all.current"] = stats["allocated_bytes.all.peak"] = _device.allocated_bytes()
    return stats


def reset_peak_memory_stats(device: Any = None) -> None:
    """No peak is kept."""


def empty_cache() -> None:
    """There is no caching allocator."""


def ipc_collect() -> None:
    """There is no inter-process memory."""


# -------------------------------------------------------------------------------------------------- random, misc


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = "npu") -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def set_compile_mode(jit_compile: bool = False) -> None:
    """Operators are not compiled."""


config = SimpleNamespace(allow_internal_format=False)
