"""A real torch device named ``npu`` whose memory is host memory.

PyTorch reserves the dispatch key ``PrivateUse1`` for out-of-tree accelerators; ``torch_npu`` uses it on hardware and
so does this module. Tensors on ``npu:0`` therefore answer ``device.type == "npu"``, refuse to be mixed with CPU tensors
and must be copied to the host to be read, as on hardware; only their bytes live in this process' heap. Engine branches
on the device need no patch, and a result that was computed on the host and moved over is visible as what it is.

How it works:

* A device tensor is made from a DLPack descriptor that names memory from ``malloc``; the memory is freed when torch
  drops the storage.
* :func:`host_view` makes a CPU tensor over the same memory. Nothing is copied, so in-place writes go through.
* One boxed fallback serves every ATen operator: it runs the CPU kernel on host views and brings new results back into
  device memory. Views never leave the device: the CPU kernel for ``as_strided`` and its kin only computes metadata and
  is called on the device tensor itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_npu._sim import integers, matmul, storage
from torch_npu._sim.memory import (
    allocated_bytes,
    current_device,
    empty,
    host_view,
    is_device,
    resolve,
    set_current_index,
    to_device,
)

__all__ = [
    "allocated_bytes", "current_device", "host_view", "install", "is_device", "set_current_index", "to_device",
]  # fmt: skip

_CPU = torch.device("cpu")
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset

#: ATen operators that ran on the host for a device tensor, by name: provenance, and a hint at missing operators.
fallback_calls: Counter[str] = Counter()


class DeviceMismatchError(RuntimeError):
    """A CPU tensor met a device tensor where hardware refuses the mixture."""


# ------------------------------------------------------------------------------------------------ the fallback

_aten = torch.ops.aten

#: Metadata-only kernels: the CPU implementation never touches the data, so it runs on the device tensor itself.
_METADATA_OPS = {
    _aten.as_strided.default,
    _aten.view.default,
    _aten.view.dtype,
    _aten.view_as_real.default,
    _aten.view_as_complex.default,
    _aten._reshape_alias.default,
    _aten.unfold.default,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
}

#: Operators that hardware lets take CPU tensors beside device tensors (indices are moved over by ATen itself).
_MIXED_OPS = {
    _aten.index.Tensor,
    _aten.index.Tensor_out,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten.copy_.default,
    _aten.set_.source_Tensor,
}


class _Call:
    """One fallback call: which host view stands for which device tensor."""

    __slots__ = ("device", "host_only", "views")

    def __init__(self) -> None:
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.device: torch.device | None = None
        self.host_only: torch.Tensor | None = None

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "npu":
                if value.dim():
                    self.host_only = value
                return value
            if self.device is None:
                self.device = value.device
            view = host_view(value)
            self.views.append((view, value))
            return view
        if isinstance(value, (list, tuple)):
            return type(value)([self.unwrap(item) for item in value])
        if isinstance(value, torch.device):
            return _CPU if value.type == "npu" else value
        return value

    def wrap(self, value: Any, target: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            for view, original in self.views:
                if value is view:
                    return original
            address = value.untyped_storage().data_ptr()
            if value.numel() and address:
                for _, original in self.views:
                    if original.untyped_storage().data_ptr() == address and original.dtype == value.dtype:
                        return _aten.as_strided.default.redispatch(
                            _CPU_KEY, original, value.size(), value.stride(), value.storage_offset()
                        )
            return to_device(value, target)
        if isinstance(value, (list, tuple)):
            return type(value)([self.wrap(item, target) for item in value])
        return value


_out_names: dict[Any, tuple[str, ...]] = {}


_tensor_positions: dict[Any, tuple[int, ...]] = {}


def _callable(op: Any, args: tuple[Any, ...]) -> Any:
    """What to call on the host for these arguments.

    A Python number where a tensor is expected (``x % 16``) reaches a boxed kernel as the number. Its overloads for
    scalars promote types as a number does, which a 0-d tensor would not; choosing among overloads finds them.
    """
    kernel = matmul.KERNELS.get(op) or integers.KERNELS.get(op)
    if kernel is not None:
        return kernel
    positions = _tensor_positions.get(op)
    if positions is None:
        kinds = [argument.type.kind() for argument in op._schema.arguments if not argument.kwarg_only]
        positions = _tensor_positions[op] = tuple(at for at, kind in enumerate(kinds) if kind == "TensorType")
    if any(at < len(args) and isinstance(args[at], (int, float, complex)) for at in positions):
        return op.overloadpacket
    return op


def _outs(op: Any) -> tuple[str, ...]:
    names = _out_names.get(op)
    if names is None:
        names = tuple(argument.name for argument in op._schema.arguments if argument.is_out)
        _out_names[op] = names
    return names


def _adopt_result(target: torch.Tensor, result: torch.Tensor) -> None:
    """Give ``target`` (an ``out=`` tensor of another shape) the result's shape and bytes."""
    fresh = to_device(result, target.device)
    _set_storage.redispatch(_CPU_KEY, target, fresh.untyped_storage(), 0, fresh.size(), fresh.stride())


def _run_out(op: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = [kwargs[name] for name in names]
    call = _Call()
    host_args = [call.unwrap(value) for value in args]
    host_kwargs = {name: call.unwrap(value) for name, value in kwargs.items()}
    _check_devices(op, call)
    kernel = _callable(op, args)
    # An empty target is to be sized by the operator, and views cannot grow: let it allocate on the host.
    for name, target in zip(names, targets, strict=True):
        if is_device(target) and target.numel() == 0:
            host_kwargs[name] = torch.empty(0, dtype=target.dtype)
    try:
        kernel(*host_args, **host_kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        host_kwargs |= {name: torch.empty(0, dtype=kwargs[name].dtype) for name in names}
        kernel(*host_args, **host_kwargs)
    for name, target in zip(names, targets, strict=True):
        out = host_kwargs[name]
        if out.shape != target.shape:
            _adopt_result(target, out)
        elif out.numel() and out.data_ptr() != target.data_ptr():
            host_view(target).copy_(out)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _check_devices(op: Any, call: _Call) -> None:
    if call.device is not None and call.host_only is not None and op not in _MIXED_OPS:
        raise DeviceMismatchError(
            f"Expected all tensors to be on the same device, but {op} got tensors on {call.device} and on cpu "
            f"(a cpu tensor of shape {tuple(call.host_only.shape)}, {call.host_only.dtype})"
        )


def _host_values(tensor: torch.Tensor) -> torch.Tensor:
    """A host view that keeps a pending conjugation or negation."""
    if not is_device(tensor):
        return tensor
    view = host_view(tensor)
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host_values(target).copy_(_host_values(source))
    return target


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """``Tensor.to`` of a device tensor. ATen's own would ask for pinned host memory when it may return early."""
    keep = memory_format or torch.preserve_format
    copy = host_view(tensor).to(dtype=dtype or tensor.dtype, memory_format=keep, copy=True)
    target = device or tensor.device
    if target.type == "npu":
        return to_device(copy, resolve(target))
    return copy if target.type == "cpu" else copy.to(target)


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.shape != source.shape:
        _resize(target, source.shape)
    return _copy_from(source, target)


def _resize(tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
    if memory_format not in (None, torch.contiguous_format):
        raise RuntimeError(f"simnpu: resize_ to {memory_format} is not simulated; resize to contiguous memory")
    stride: list[int] = []
    step = 1
    for n in reversed(list(size)):
        stride.insert(0, step)
        step *= max(1, n)
    needed = (tensor.storage_offset() + (0 if 0 in size else step)) * tensor.element_size()
    storage: Any = tensor.untyped_storage()
    offset = tensor.storage_offset()
    if needed > storage.nbytes():
        grown = empty(size, stride, tensor.dtype, tensor.device)
        keep = min(tensor.numel(), grown.numel())
        if keep:
            host_view(grown).view(-1)[:keep] = host_view(tensor).reshape(-1)[:keep]
        storage, offset = grown.untyped_storage(), 0
    _set_storage.redispatch(_CPU_KEY, tensor, storage, offset, size, stride)
    return tensor


def _empty_memory_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> torch.Tensor:
    model = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return empty(model.size(), model.stride(), model.dtype, resolve(device or torch.device("npu")))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return empty(size, stride, dtype or torch.get_default_dtype(), resolve(device or torch.device("npu")))


def _item(tensor: torch.Tensor) -> Any:
    return host_view(tensor).item()


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._copy_from.default: _copy_from,
    _aten._copy_from_and_resize.default: _copy_from_and_resize,
    _aten.resize_.default: _resize,
    _aten.empty.memory_format: _empty_memory_format,
    _aten.empty_strided.default: _empty_strided,
    _aten._local_scalar_dense.default: _item,
}


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    if op in _METADATA_OPS:
        return op.redispatch(_CPU_KEY, *args, **kwargs)
    fallback_calls[str(op)] += 1
    names = _outs(op)
    if names:
        return _run_out(op, names, args, kwargs)
    call = _Call()
    host_args = [call.unwrap(value) for value in args]
    host_kwargs = {name: call.unwrap(value) for name, value in kwargs.items()}
    _check_devices(op, call)
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    wanted = kwargs.get("device")
    result = _callable(op, args)(*host_args, **host_kwargs)
    if wanted is not None and wanted.type != "npu":
        return result.clone() if any(result is view for view, _ in call.views) else result
    target = resolve(wanted) if wanted is not None else (call.device or current_device())
    return call.wrap(result, target)


# ------------------------------------------------------------------------------------------------- registration


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _storage_location(storage: Any) -> str | None:
    return str(storage.device) if storage.device.type == "npu" else None


def _restore_storage(storage: Any, location: str) -> Any:
    """Unpickle onto the device: torch's own way asks for a device allocator, which only C++ can provide."""
    if not location.startswith("npu"):
        return None
    untyped = storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
    data = torch.empty(0, dtype=torch.uint8).set_(untyped)
    return to_device(data, resolve(torch.device(location))).untyped_storage()


#: Kept alive: a library that is dropped takes its kernels with it.
_libraries: list[torch.library.Library] = []


def install(module: Any) -> None:
    """Register the device with torch. ``module`` becomes ``torch.npu``. Idempotent.

    Raises:
        RuntimeError: another backend already took the name of the private device.
    """
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", module, _Hooks(), _Guard())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend([everything, aten])
    everything.fallback(_fallback, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    aten.impl("convolution_overrideable", functools.partial(_fallback, _aten.convolution.default), "PrivateUse1")
    # torch would resolve a pending conjugation by a copy, which is this very operator.
    for key in ("Conjugate", "Negative"):
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    storage.install()
    # Smaller numbers are asked first; torch's own handler of private devices registers at 21.
    torch.serialization.register_package(19, _storage_location, _restore_storage)
