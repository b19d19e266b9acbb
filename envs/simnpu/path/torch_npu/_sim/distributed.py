"""``hccl``: collectives of device tensors, run by gloo on host views of them.

The backend is a gloo process group under HCCL's name. torch dispatches collectives by the tensors' device, so every
``c10d::`` operator gets an implementation for the device that calls itself again with host views; in-place results go
through to device memory. HCCL accepts per-rank tensors of different lengths in ``all_gather`` and ``reduce_scatter``;
gloo does not, so those run as broadcasts and as a sum that is sliced.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu._sim.device import host_view, is_device

#: Device tensors of collectives that may still be running: gloo holds only the host views.
_in_flight: list[tuple[Any, list[torch.Tensor]]] = []

#: Process groups by the name get_hccl_comm_name gave them, for operators that address a group by name.
groups: dict[str, Any] = {}


def _host(value: Any, kept: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_device(value):
            return value
        if not value.is_contiguous():
            # gloo would take the bytes between the elements for elements.
            raise RuntimeError(f"simnpu: hccl needs contiguous tensors, got strides {value.stride()}")
        kept.append(value)
        return host_view(value)
    if isinstance(value, (list, tuple)):
        return [_host(item, kept) for item in value]
    return value


def _keep(work: Any, tensors: list[torch.Tensor]) -> None:
    _in_flight[:] = [(other, kept) for other, kept in _in_flight if not other.is_completed()]
    if not work.is_completed():
        _in_flight.append((work, tensors))


def _on_host(op: Any) -> Any:
    def collective(*args: Any, **kwargs: Any) -> Any:
        kept: list[torch.Tensor] = []
        result = op(*[_host(value, kept) for value in args], **{k: _host(v, kept) for k, v in kwargs.items()})
        work = result[-1] if isinstance(result, (list, tuple)) else result
        if isinstance(work, torch.ScriptObject):  # a Work, as the dispatcher carries it
            _keep(dist.Work.unbox(work), kept)
        if isinstance(result, (list, tuple)):
            # The first result repeats the output argument; hand back the device tensors.
            return (args[0], *result[1:])
        return result

    return collective


class _Together:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            _ = work.wait() if timeout is None else work.wait(timeout)
        return True


def _uneven(tensors: list[torch.Tensor]) -> bool:
    return len({tuple(tensor.shape) for tensor in tensors}) > 1


def _install_uneven() -> None:
    c10d = dist.distributed_c10d
    all_gather, reduce_scatter = c10d.all_gather, c10d.reduce_scatter

    def gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list) or not is_device(tensor):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        mine = dist.get_rank(group)
        works = []
        for rank, target in enumerate(tensor_list):
            if rank == mine:
                target.copy_(tensor)
            source = dist.get_global_rank(group, rank) if group is not None else rank
            works.append(c10d.broadcast(target, src=source, group=group, async_op=async_op))
        return _Together(works) if async_op else None

    def scatter(
        output: torch.Tensor, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not is_device(output):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        if async_op:
            raise RuntimeError(
                "simnpu: reduce_scatter of a tensor list runs synchronously; call it with async_op=False"
            )
        flat = torch.cat([tensor.reshape(-1) for tensor in input_list])
        dist.all_reduce(flat, op=op, group=group)
        start = sum(tensor.numel() for tensor in input_list[: dist.get_rank(group)])
        output.copy_(flat[start : start + output.numel()].view(output.shape))
        return None

    for name, function in (("all_gather", gather), ("reduce_scatter", scatter)):
        setattr(c10d, name, function)
        setattr(dist, name, function)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _comm_name(self: Any, rank: int) -> str:
    name = f"simnpu_hccl_{id(self)}"
    groups[name] = self
    return name


_library: torch.library.Library | None = None


def install() -> None:
    """Register the ``hccl`` backend. Does nothing where torch was built without distributed support."""
    global _library
    if _library is not None or not dist.is_available():
        return
    dist.Backend.register_backend("hccl", _create, devices=["npu", "cpu"])
    dist.ProcessGroupGloo.get_hccl_comm_name = _comm_name  # type: ignore[attr-defined]
    dist.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    dist.ProcessGroupHCCL = ProcessGroupHCCL  # type: ignore[attr-defined]
    _library = torch.library.Library("c10d", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("c10d::") and not schema.overload_name:
            name = schema.name.removeprefix("c10d::")
            overloads = getattr(torch.ops.c10d, name)
            with torch._C._DisableTorchDispatch(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that torch's own kernels are replaced
                _library.impl(name, _on_host(overloads.default), "PrivateUse1", allow_override=True)
    _install_uneven()
