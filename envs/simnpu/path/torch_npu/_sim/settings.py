"""What can be chosen about the simulated NPU, all by environment variables, read once per process.

=============================  =======================================================================
``ALIGN_SIMNPU_SOC``           ``A2`` (default) or ``A3``: the generation the SoC version number names
``ALIGN_SIMNPU_DEVICES``       how many devices exist, default 8
``ALIGN_SIMNPU_MEMORY_GIB``    memory one device reports, default 16
``ALIGN_SIMNPU_NUMERICS``      see :mod:`torch_npu._sim.numerics`
``ALIGN_SIMNPU_FAULT``         see :mod:`torch_npu._sim.registry`; for tests only
=============================  =======================================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Soc:
    """One generation: the number ``get_soc_version`` answers, and the name of the device."""

    generation: str
    version: int
    device_name: str
    build_name: str


#: Version ranges: 220-225 is A2, 250-255 is A3 (vllm-ascend device/hardware.py and dlinfer's SocVersion agree).
SOCS = {
    "A2": Soc("A2", 223, "Ascend910B3", "ascend910b1"),
    "A3": Soc("A3", 253, "Ascend910_9391", "ascend910_9391"),
}


@dataclass(frozen=True)
class Settings:
    soc: Soc
    device_count: int
    memory_bytes: int


_settings: Settings | None = None


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} is not a positive whole number; unset it for the default, {default}")
    return int(text)


def load() -> Settings:
    """The settings of this process.

    Raises:
        ValueError: an environment variable holds a value that does not exist.
    """
    global _settings
    if _settings is None:
        generation = os.environ.get("ALIGN_SIMNPU_SOC", "A2").upper()
        if generation not in SOCS:
            raise ValueError(f"ALIGN_SIMNPU_SOC={generation!r} is not one of {', '.join(SOCS)}")
        _settings = Settings(
            soc=SOCS[generation],
            device_count=_positive("ALIGN_SIMNPU_DEVICES", 8),
            memory_bytes=_positive("ALIGN_SIMNPU_MEMORY_GIB", 16) << 30,
        )
    return _settings
