"""A real torch device named ``npu`` whose memory is host memory.

PyTorch reserves the dispatch key ``PrivateUse1`` for out-of-tree accelerators; ``torch_npu`` uses it on hardware and so
does this module. Tensors on ``npu:0`` therefore answer ``device.type == "npu"``, refuse to be mixed with CPU tensors and
must be copied to the host to be read, as on hardware; only their bytes live in this process' heap. Engine branches on
the device need no patch, and a result that was computed on the host and moved over is visible as what it is.

How it works:

* A device tensor is made from a DLPack descriptor that names memory from ``aligned_alloc``; the memory is freed when
  torch drops the storage.
* :func:`host_view` makes a CPU tensor over the same memory. Nothing is copied, so in-place writes go through.
* One boxed fallback serves every ATen operator: it runs the CPU kernel on host views and brings new results back into
  device memory. Views never leave the device: the CPU kernel for ``as_strided`` and its kin only computes metadata and
  is called on the device tensor itself.
"""

from __future__ import annotations

import ctypes
import resource
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_npu._sim import matmul

__all__ = ["host_view", "install", "is_device", "to_device"]

_CPU = torch.device("cpu")

#: ATen operators that ran on the host for a device tensor, by name: provenance, and a hint at missing operators.
fallback_calls: Counter[str] = Counter()


class DeviceMismatchError(RuntimeError):
    """A CPU tensor met a device tensor where hardware refuses the mixture."""


def is_device(tensor: torch.Tensor) -> bool:
    """True for tensors on the simulated device."""
    return tensor.device.type == "npu"


# ------------------------------------------------------------------------------------------------- device memory


_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_free_address = ctypes.cast(_libc.free, ctypes.c_void_p).value

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_ALIGNMENT = 64
#: One block holds the DLPack descriptor, the shape and strides it points to, and then the data.
_HEADER_BYTES = 256
_MAX_DIMS = 12
_DLPACK_EXTENSION_DEVICE = 12
#: data, device type, device index, ndim, dtype code, bits, lanes, shape, strides, byte offset, context, deleter
_DESCRIPTOR = struct.Struct("<QiiiBBHQQQQQ")
_DLPACK_TYPES = {
    torch.bool: (6, 8),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.complex64: (5, 64), torch.complex128: (5, 128),
}  # fmt: skip


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised device tensor.

    DLPack is the one public way to hand torch memory of a named device. The descriptor and the data share a block, so
    the block's own ``free`` is a complete deleter: no Python runs when torch drops the storage, in whichever thread.
    """
    if dtype not in _DLPACK_TYPES:
        raise RuntimeError(f"simnpu: tensors of {dtype} are not simulated on the device")
    if len(size) > _MAX_DIMS:
        raise RuntimeError(f"simnpu: {len(size)} dimensions; the simulated device takes at most {_MAX_DIMS}")
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    nbytes = max(_ALIGNMENT, extent * dtype.itemsize)
    total = (_HEADER_BYTES + nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    block = _libc.aligned_alloc(_ALIGNMENT, total)
    if not block:
        raise torch.OutOfMemoryError(f"simnpu: out of host memory while allocating {nbytes} bytes for {device}")
    ndim = len(size)
    code, bits = _DLPACK_TYPES[dtype]
    shape_at = block + _DESCRIPTOR.size
    header = _DESCRIPTOR.pack(
        block + _HEADER_BYTES, _DLPACK_EXTENSION_DEVICE, device.index, ndim, code, bits, 1,
        shape_at, shape_at + 8 * ndim, 0, 0, _free_address,
    )  # fmt: skip
    header += struct.pack(f"<{2 * ndim}q", *size, *stride)
    ctypes.memmove(block, header, len(header))
    tensor: torch.Tensor = torch._C._from_dlpack(_capsule(block, b"dltensor", None))
    return tensor


def allocated_bytes() -> int:
    """Resident memory of this process in bytes; device memory is part of it and is not counted apart."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and without gaps, so that a copy may keep the strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def to_device(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy a CPU tensor into device memory, keeping strides of dense tensors.

    Args:
        tensor: any strided CPU tensor.
        device: an ``npu`` device with an index; the current one by default.
    """
    if not _is_dense(tensor):
        tensor = tensor.contiguous()
    copy = _empty(tensor.size(), tensor.stride(), tensor.dtype, device or current_device())
    if tensor.numel():
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return copy


# ---------------------------------------------------------------------------------------------------- host views

_shim = ctypes.CDLL(str(torch.__path__[0]) + "/lib/libtorch_cpu.so")
_from_blob = _shim.torch_from_blob
_from_blob.restype = ctypes.c_int32
_from_blob.argtypes = [
    ctypes.c_void_p,  # data
    ctypes.c_int64,  # ndim
    ctypes.c_void_p,  # sizes
    ctypes.c_void_p,  # strides
    ctypes.c_int64,  # storage offset
    ctypes.c_int32,  # dtype
    ctypes.c_int32,  # device type
    ctypes.c_int32,  # device index
    ctypes.c_void_p,  # returned handle
    ctypes.c_int32,  # layout
    ctypes.c_void_p,  # opaque metadata
    ctypes.c_int64,
    ctypes.c_void_p,  # deleter
    ctypes.c_void_p,
]
_adopt = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr


def _dtype_codes() -> dict[torch.dtype, int]:
    codes = {}
    for name in dir(torch):
        dtype = getattr(torch, name)
        getter = getattr(_shim, f"aoti_torch_dtype_{name}", None) if isinstance(dtype, torch.dtype) else None
        if getter is not None:
            codes[dtype] = getter()
    return codes


_DTYPE_CODES = _dtype_codes()
_EMPTY_DIMS = (ctypes.c_int64 * 1)(0)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory as a device tensor: same shape, strides and dtype, no copy.

    The caller must keep ``tensor`` alive while the view is in use.
    """
    ndim = tensor.dim()
    dims = ctypes.c_int64 * ndim
    sizes = dims(*tensor.size()) if ndim else _EMPTY_DIMS
    strides = dims(*tensor.stride()) if ndim else _EMPTY_DIMS
    handle = ctypes.c_void_p()
    base = tensor.untyped_storage().data_ptr()
    failed = _from_blob(
        base, ndim, sizes, strides, tensor.storage_offset(), _DTYPE_CODES[tensor.dtype],
        0, -1, ctypes.byref(handle), 0, None, 0, None, None,
    )  # fmt: skip
    if failed:
        raise RuntimeError(f"simnpu: torch refused a host view of {tuple(tensor.shape)} {tensor.dtype}")
    view: torch.Tensor = _adopt(_capsule(handle.value, None, None))
    return view


# ------------------------------------------------------------------------------------------------ current device

_current_index = 0


def current_device() -> torch.device:
    """The device new tensors go to when only ``npu`` is asked for."""
    return torch.device("npu", _current_index)


def set_current_index(index: int) -> None:
    global _current_index
    _current_index = index


def _resolve(device: torch.device) -> torch.device:
    """The device that is meant.

    torch fills in a missing index in C++, where a Python backend cannot say which device is current, and always fills
    in 0. A process uses one device, so 0 stands for the current one.
    """
    return device if device.index else current_device()


# ------------------------------------------------------------------------------------------------ the fallback

_aten = torch.ops.aten

#: Metadata-only kernels: the CPU implementation never touches the data, so it runs on the device tensor itself.
_METADATA_OPS = {
    _aten.as_strided.default,
    _aten.view.default,
    _aten.view.dtype,
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
    kernel = matmul.KERNELS.get(op)
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
    host_kwargs = {name: call.unwrap(value) for name, value in kwargs.items() if name not in names}
    _check_devices(op, call)
    scratch: list[torch.Tensor] = []
    for name, target in zip(names, targets, strict=True):
        # An empty target is to be sized by the operator, and views cannot grow: let it allocate on the host.
        direct = target.numel() > 0
        out = (host_view(target) if direct else torch.empty(0, dtype=target.dtype)) if is_device(target) else target
        scratch.append(out)
        host_kwargs[name] = out
    _callable(op, args)(*host_args, **host_kwargs)
    for target, out in zip(targets, scratch, strict=True):
        if is_device(target) and target.numel() == 0 and (out.numel() or out.shape != target.shape):
            _adopt_result(target, out)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _check_devices(op: Any, call: _Call) -> None:
    if call.device is not None and call.host_only is not None and op not in _MIXED_OPS:
        raise DeviceMismatchError(
            f"Expected all tensors to be on the same device, but {op} got tensors on {call.device} and on cpu "
            f"(a cpu tensor of shape {tuple(call.host_only.shape)}, {call.host_only.dtype})"
        )


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    host_target = host_view(target) if is_device(target) else target
    host_target.copy_(host_view(source) if is_device(source) else source)
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
        return to_device(copy, _resolve(target))
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
        grown = _empty(size, stride, tensor.dtype, tensor.device)
        keep = min(tensor.numel(), grown.numel())
        if keep:
            host_view(grown).view(-1)[:keep] = host_view(tensor).reshape(-1)[:keep]
        storage, offset = grown.untyped_storage(), 0
    return _set_storage.redispatch(_CPU_KEY, tensor, storage, offset, size, stride)


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
    return _empty(model.size(), model.stride(), model.dtype, _resolve(device or torch.device("npu")))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return _empty(size, stride, dtype or torch.get_default_dtype(), _resolve(device or torch.device("npu")))


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
    target = _resolve(wanted) if wanted is not None else (call.device or current_device())
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
    return to_device(data, _resolve(torch.device(location))).untyped_storage()


_library: torch.library.Library | None = None
_overrides: torch.library.Library | None = None


def install(module: Any) -> None:
    """Register the device with torch. ``module`` becomes ``torch.npu``. Idempotent.

    Raises:
        RuntimeError: another backend already took the name of the private device.
    """
    global _library, _overrides
    if _library is not None:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", module, _Hooks(), _Guard())
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_fallback, "PrivateUse1")
    _overrides = torch.library.Library("aten", "IMPL")
    _overrides.impl("_to_copy", _to_copy, "PrivateUse1")
    # Smaller numbers are asked first; torch's own handler of private devices registers at 21.
    torch.serialization.register_package(19, _storage_location, _restore_storage)
