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

from adapters.probe import collectives

#: Module of an engine → our module whose ``install(module)`` runs right after it was executed.
HOOKS = {
    "lmdeploy.pytorch.engine.model_agent.agent": "adapters.lmdeploy.hooks",
    "vllm_ascend.worker.model_runner_v1": "adapters.vllm.hooks",
}


#: Script of every process in which Ray runs actors.
_RAY_WORKER = "default_worker.py"


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
            collectives.wrap_functions()  # of those that a device's package has put in torch's place since
            importlib.import_module(HOOKS[name]).install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def autoload() -> None:
    """Arm the hooks, and wrap torch's collectives before anybody imports them by name. Idempotent."""
    directory = os.environ.get("ALIGN_PROBE_DIR")
    if not directory:
        return
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
        if os.path.basename(sys.argv[0]) == _RAY_WORKER:
            _log_to(directory)
    collectives.wrap_functions()


def _log_to(directory: str) -> None:
    """What an actor of Ray prints goes into Ray's own files, which end with the run: into the side's log instead."""
    log = os.open(os.path.join(directory, "engine.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
