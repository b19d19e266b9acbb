"""How much memory one device has, before any engine runs on it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from envs.profiles import SIMNPU_PATH

_SETTINGS = SIMNPU_PATH / "torch_npu" / "_sim" / "settings.py"


def device_memory(device: str) -> int | None:
    """Bytes of one device: what the simulated one claims; ``None`` of hardware, which only its own packages can ask.

    Raises:
        ValueError: a variable of the simulated device has a value that does not exist.
    """
    return int(_simulated().load().memory_bytes) if device == "simnpu" else None


def _simulated() -> ModuleType:
    """The simulated device's settings, which import nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("_simnpu_settings", _SETTINGS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
