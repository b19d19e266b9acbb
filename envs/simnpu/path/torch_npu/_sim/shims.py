"""Everything the simulation changes beside the device and its operators: one table, printed in reports.

A shim exists where an engine needs something that only CANN, Triton or a compiled extension provides. Each row says
what is replaced, by what, and why; nothing else of the engines is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.utils._device


@dataclass(frozen=True)
class Shim:
    """One replacement: ``target`` is replaced by ``stand_in`` because of ``reason``.

    ``module`` is the module after whose execution ``apply`` runs (before it, with ``before``), or empty when it runs at
    once.
    """

    target: str
    stand_in: str
    reason: str
    module: str
    apply: Callable[[Any], None]
    before: bool = False


# ------------------------------------------------------------------------------------------- torch, at once


def _no_pinning(_: Any) -> None:
    # `with torch.device(...)` recognises factories by identity and remembers them: let it see the originals.
    torch.utils._device._device_constructors()

    def without_pin(function: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("pin_memory", False):
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        factory.__name__, factory.__doc__ = getattr(function, "__name__", "factory"), function.__doc__
        return factory

    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like"):
        setattr(torch, name, without_pin(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, device=None: self
    tensor.is_pinned = lambda self, device=None: False


def _host_accelerator_calls(_: Any) -> None:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    accelerator: Any = torch.accelerator
    for ours, theirs in {
        "synchronize": "synchronize", "empty_cache": "empty_cache", "memory_stats": "memory_stats",
        "memory_allocated": "memory_allocated", "memory_reserved": "memory_reserved",
        "max_memory_allocated": "max_memory_allocated", "max_memory_reserved": "max_memory_reserved",
        "reset_peak_memory_stats": "reset_peak_memory_stats", "get_memory_info": "mem_get_info",
        "current_stream": "current_stream", "set_stream": "set_stream", "set_device_index": "set_device",
        "current_device_index": "current_device", "device_count": "device_count", "is_available": "is_available",
    }.items():  # fmt: skip
        setattr(accelerator, ours, getattr(npu, theirs))


def _cann_version(_: Any) -> None:
    torch.version.cann = "simulated"  # type: ignore[attr-defined]


def _load_library(_: Any) -> None:
    load: Any = torch.ops.load_library

    def load_library(path: Any) -> None:
        if "libop_plugin_atb" not in str(path):
            load(path)

    torch.ops.load_library = load_library  # type: ignore[method-assign]


# --------------------------------------------------------------------------------- engines, after import


class _SlotMapping:
    """Slot of each token: ``block_table[request, position // block] * block + position % block``; the rest is PAD."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        requests = grid[0] - 1

        def run(
            num_tokens: int, max_num_tokens: int, query_start_loc: torch.Tensor, positions: torch.Tensor,
            block_table: torch.Tensor, block_table_stride: int, block_size: int, slot_mapping: torch.Tensor,
            *, PAD_ID: int, TOTAL_CP_WORLD_SIZE: int = 1, **_: Any,
        ) -> None:  # fmt: skip
            if TOTAL_CP_WORLD_SIZE != 1:
                raise RuntimeError("simnpu: slots under context parallelism are not simulated; launch without it")
            starts = query_start_loc[: requests + 1].tolist()
            for row in range(requests):
                span = slice(starts[row], starts[row + 1])
                position = positions[span].long()
                blocks = block_table[row].long()[position // block_size]
                slot_mapping[span] = (blocks * block_size + position % block_size).to(slot_mapping.dtype)
            slot_mapping[num_tokens:max_num_tokens] = PAD_ID

        return run


def _slot_mapping(module: Any) -> None:
    module._compute_slot_mapping_kernel = _SlotMapping()


def _build_info(module: Any) -> None:
    from torch_npu._sim import settings

    soc = settings.load().soc
    module.__device_type__ = soc.generation
    module.__soc_version__ = soc.build_name


def _torchvision_schemas(_: Any) -> None:
    """torchvision registers shape functions for its compiled operators and fails to import without their schemas."""
    global _torchvision
    _torchvision = torch.library.Library("torchvision", "FRAGMENT")
    box = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        f"roi_align({box}, int sampling_ratio, bool aligned) -> Tensor",
        f"roi_pool({box}) -> (Tensor, Tensor)",
        f"ps_roi_align({box}, int sampling_ratio) -> (Tensor, Tensor)",
        f"ps_roi_pool({box}) -> (Tensor, Tensor)",
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
        "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
        "SymInt offset_groups, bool use_mask) -> Tensor",
    ):
        if not hasattr(torch.ops.torchvision, schema.split("(")[0]):
            _torchvision.define(schema)


_torchvision: torch.library.Library | None = None

TABLE = (
    Shim(
        "torch factories' pin_memory, Tensor.pin_memory", "ignored", "host and device memory are one",
        "", _no_pinning,
    ),
    Shim("torch.accelerator.*", "torch.npu.*", "the device has no C++ runtime", "", _host_accelerator_calls),
    Shim("torch.version.cann", "'simulated'", "CANN is absent", "", _cann_version),
    Shim(
        "torch.ops.load_library(libop_plugin_atb.so)", "nothing", "the atb operators are simulated",
        "", _load_library,
    ),
    Shim(
        "vllm.v1.worker.block_table._compute_slot_mapping_kernel", "the same arithmetic in torch",
        "Triton is absent", "vllm.v1.worker.block_table", _slot_mapping,
    ),
    Shim(
        "vllm_ascend._build_info", "the simulated SoC generation", "the wheel is built for one generation",
        "vllm_ascend._build_info", _build_info,
    ),
    Shim(
        "torchvision's compiled operators", "their schemas, without kernels",
        "text generation only imports torchvision", "torchvision", _torchvision_schemas, before=True,
    ),
)  # fmt: skip

#: Compiled modules whose import only has to succeed; their operators are in the signature tables.
STAND_IN_MODULES = {"vllm_ascend.vllm_ascend_C": "registers the _C_ascend operators, which the simulation does itself"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a shim right after the module it belongs to was executed, and serves stand-in modules."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name in STAND_IN_MODULES:
            return importlib.machinery.ModuleSpec(name, _StandIn())
        shims = [shim for shim in TABLE if shim.module == name]
        if not shims:
            return None
        # What the finders behind this one say: a fresh loader, also for a reload.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            for shim in shims:
                if shim.before:
                    shim.apply(module)
            execute(module)
            for shim in shims:
                if not shim.before:
                    shim.apply(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _StandIn(importlib.abc.Loader):
    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Stand-in of the simulation: {STAND_IN_MODULES[module.__name__]}."


_installed = False


def install() -> None:
    """Apply the rows that need no module and arm the others. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    for shim in TABLE:
        if not shim.module:
            shim.apply(None)
    sys.meta_path.insert(0, _AfterImport())
