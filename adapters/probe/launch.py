"""What a worker must know about the launch it belongs to, left in the side's directory before the engine starts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from adapters.base import EngineSpec

_FILE = "launch.json"
#: Environment variable with the data-parallel group that an engine and its workers serve.
DP_RANK = "ALIGN_DP_RANK"
#: The device whose operators are simulated; its collectives block the host.
SIMULATED = "simnpu"


def probe_dir() -> Path:
    """The directory of this side, which the driver put into the environment."""
    return Path(os.environ["ALIGN_PROBE_DIR"])


def write_launch(spec: EngineSpec) -> None:
    """Leave the specification for the workers.

    The hosts of all data-parallel groups write the same: a worker asks its engine which group it is of.
    """
    temporary = probe_dir() / f"{_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(replace(spec, dp_rank=0))), encoding="utf-8")
    os.replace(temporary, probe_dir() / _FILE)


def read_launch() -> EngineSpec:
    """The specification of the launch that this worker belongs to."""
    plain = json.loads((probe_dir() / _FILE).read_text(encoding="utf-8"))
    return EngineSpec(**{**plain, "patches": tuple(plain["patches"])})
