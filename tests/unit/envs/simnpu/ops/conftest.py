"""The raw operators are imported without installing the device: it would take over the whole test process."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIMNPU = HERE.parents[4] / "envs" / "simnpu" / "path"

if "torch_npu" not in sys.modules:
    # A bare parent package, so that torch_npu/__init__.py does not run.
    parent = types.ModuleType("torch_npu")
    # With a spec, because transformers asks whether the package is there (and then finds that torch has no npu).
    parent.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None, is_package=True)
    parent.__path__ = [str(SIMNPU / "torch_npu")]
    sys.modules["torch_npu"] = parent
sys.path.insert(0, str(HERE))


@pytest.fixture(params=["fp32-internal", "native"])
def numerics(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test under each numerics."""
    module = importlib.import_module("torch_npu._sim.numerics")
    previous = module.set_numerics(request.param)
    yield str(request.param)
    module.set_numerics(previous)


@pytest.fixture(scope="session")
def simnpu_path() -> Path:
    """The folder to put on sys.path for the simulated torch_npu."""
    return SIMNPU
