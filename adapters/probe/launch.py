"""What a worker must know about the launch it belongs to, left in the side's directory before the engine starts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from adapters.base import EngineSpec

_FILE = "launch.json"
#: The device whose operators are simulated; its collectives block the host.
SIMULATED = "simnpu"


def probe_dir() -> Path:
    """The directory of this side, which the driver put into the environment."""
    return Path(os.environ["ALIGN_PROBE_DIR"])


def write_launch(spec: EngineSpec) -> None:
    """Leave the specification for the workers."""
    (probe_dir() / _FILE).write_text(json.dumps(asdict(spec)), encoding="utf-8")


def read_launch() -> EngineSpec:
    """The specification of the launch that this worker belongs to."""
    plain = json.loads((probe_dir() / _FILE).read_text(encoding="utf-8"))
    return EngineSpec(**{**plain, "patches": tuple(plain["patches"])})
