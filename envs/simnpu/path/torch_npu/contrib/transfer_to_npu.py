"""Makes code written for ``cuda`` run on ``npu``, when imported, as torch_npu's module of this name does.

Functions that take a device accept ``"cuda"`` and mean ``"npu"``; ``torch.cuda.X`` becomes ``torch.npu.X`` where that
exists; ``nccl`` becomes ``hccl``. Which functions are covered follows the lists of torch_npu.contrib.transfer_to_npu.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_npu._sim import device as _device

_TORCH = (  # noqa: SIM905 - a list of forty words
    "logspace randint hann_window rand full_like ones_like rand_like randperm arange frombuffer normal empty_strided "
    "empty_like scalar_tensor tril_indices bartlett_window ones randn kaiser_window tensor triu_indices as_tensor "
    "zeros randint_like full eye empty blackman_window zeros_like range randn_like from_file linspace hamming_window "
    "autocast load set_default_device"
).split()
_TENSOR = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to"]
_MODULE = ["to", "to_empty"]
_KEYWORDS = ("device", "device_type", "map_location", "device_id")


def _moved(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        # With its index, so that moving to the device a tensor is on already stays a no-op.
        index: Any = value.index
        return torch.device("npu", _device.current_device().index if index is None else index)
    return value


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in _KEYWORDS:
            if name in kwargs:
                kwargs[name] = _moved(kwargs[name])
        return function(*[_moved(value) for value in args], **kwargs)

    return wrapper


def _patch(owner: Any, names: list[str]) -> None:
    for name in names:
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, _wrap(function))


def _hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "hccl"
        return function(*["hccl" if value == "nccl" else value for value in args], **kwargs)

    return wrapper


def _install() -> None:
    _patch(torch, _TORCH)
    _patch(torch.Tensor, _TENSOR)
    _patch(torch.nn.Module, _MODULE)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    torch.Tensor.cuda = torch.Tensor.npu  # type: ignore[attr-defined,method-assign]
    torch.nn.Module.cuda = torch.nn.Module.npu  # type: ignore[attr-defined,method-assign]
    for name in dir(npu):
        if not name.startswith("__") and hasattr(torch.cuda, name) and callable(getattr(npu, name)):
            setattr(torch.cuda, name, getattr(npu, name))
    cuda: Any = torch.cuda
    cuda.CUDAGraph = npu.NPUGraph
    for name in ("init_process_group", "new_group"):
        wrapped = _hccl(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)


_install()
