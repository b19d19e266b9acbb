"""Memory of the simulated device: host memory that torch knows as the memory of a device named ``npu``."""

from __future__ import annotations

import ctypes
import resource
import struct
from collections.abc import Sequence

import torch

from torch_npu._sim import settings

__all__ = [
    "allocated_bytes", "check_index", "current_device", "empty", "host_view", "is_device", "resolve",
    "set_current_index", "to_device",
]  # fmt: skip


def is_device(tensor: torch.Tensor) -> bool:
    """True for tensors on the simulated device."""
    return tensor.device.type == "npu"


# ------------------------------------------------------------------------------------------------- device memory


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
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


def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
    # Not aligned_alloc: glibc cannot reuse what it freed of such blocks, so the heap would grow with every step.
    block = _libc.malloc(_HEADER_BYTES + _ALIGNMENT + nbytes)
    if not block:
        raise torch.OutOfMemoryError(f"simnpu: out of host memory while allocating {nbytes} bytes for {device}")
    ndim = len(size)
    code, bits = _DLPACK_TYPES[dtype]
    shape_at = block + _DESCRIPTOR.size
    data_at = -(-(block + _HEADER_BYTES) // _ALIGNMENT) * _ALIGNMENT
    header = _DESCRIPTOR.pack(
        data_at, _DLPACK_EXTENSION_DEVICE, device.index, ndim, code, bits, 1,
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
    copy = empty(tensor.size(), tensor.stride(), tensor.dtype, device or current_device())
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


def check_index(index: int) -> int:
    """``index``, if there is such a device.

    Raises:
        RuntimeError: no such device.
    """
    count = settings.load().device_count
    if not 0 <= index < count:
        raise RuntimeError(
            f"simnpu: invalid device index {index}; {count} devices exist (ALIGN_SIMNPU_DEVICES sets how many)"
        )
    return index


def set_current_index(index: int) -> None:
    global _current_index
    _current_index = check_index(index)


def resolve(device: torch.device) -> torch.device:
    """The device that is meant.

    torch fills in a missing index in C++, where a Python backend cannot say which device is current, and always fills
    in 0. A process uses one device, so 0 stands for the current one.
    """
    if not device.index:
        return current_device()
    check_index(device.index)
    return device
