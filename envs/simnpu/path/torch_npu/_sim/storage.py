"""What torch does with the storage of a tensor beside its operators, which asks for a device allocator."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_npu._sim.memory import host_view, to_device


def _bytes(storage: Any) -> torch.Tensor:
    """A view of device memory on the host, uint8."""
    return host_view(torch.empty(0, dtype=torch.uint8, device="npu").set_(storage))


def _clone_storage(clone: Any) -> Any:
    """``copy.deepcopy`` of a tensor clones its storage, which asks for a device allocator as well."""

    @functools.wraps(clone)
    def wrapper(self: Any) -> Any:
        if self.device.type != "npu":
            return clone(self)
        return to_device(_bytes(self)).untyped_storage()

    return wrapper


def _resize_storage(original: Any) -> Any:
    def resize_(self: Any, size: int) -> Any:
        """Gives memory back. It stays until the storage is dropped, and whoever still reads it reads NaN."""
        if self.device.type != "npu":
            return original(self, size)
        if size > self.nbytes():
            raise RuntimeError(f"simnpu: a storage of {self.nbytes()} bytes cannot grow to {size} by itself")
        _bytes(self)[size:].fill_(255)
        return None

    return resize_


def install() -> None:
    """Replace the methods of torch's storage for memory of the device."""
    torch.UntypedStorage.clone = _clone_storage(torch.UntypedStorage.clone)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resize_storage(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
