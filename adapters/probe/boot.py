"""Brings the hooks into every process of an engine.

torch loads this module at the end of ``import torch`` (its ``torch.backends`` entry points), so it is present in the
engine's own process, in spawned workers and in Ray workers alike, without touching the engine's installation. It does
nothing unless ``ALIGN_PROBE_DIR`` names the directory that the driver prepared for this side.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from types import ModuleType
from typing import Any

#: Module of an engine → our module whose ``install(module)`` runs right after it was executed.
HOOKS = {
    "lmdeploy.pytorch.engine.model_agent.agent": "adapters.lmdeploy.hooks",
    "vllm_ascend.worker.model_runner_v1": "adapters.vllm.hooks",
}


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in HOOKS:
            return None
        # What the finders behind this one say: a fresh loader, also for a reload.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((one for one in found if one is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(HOOKS[name]).install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def autoload() -> None:
    """Arm the hooks. Idempotent."""
    if os.environ.get("ALIGN_PROBE_DIR") and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
