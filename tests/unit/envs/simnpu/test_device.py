"""The npu device: identity, copies, views, out=, refused mixtures, and ATen operators against the CPU, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.envs.simnpu import session
from tests.unit.envs.simnpu.operators import OPERATORS

SCRIPTS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("device", "value", "operator")]


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    """The operators are compared bit by bit, so halves are multiplied as the CPU does it."""
    return session.run(*SCRIPTS, env={"ALIGN_SIMNPU_NUMERICS": "native"})


@pytest.mark.parametrize("name", session.names(*SCRIPTS))
def test_device(report: dict[str, str], name: str) -> None:
    assert not report[name], report[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_the_cpu(report: dict[str, str], name: str) -> None:
    assert not report[name], report[name]


def test_the_device_stays_out_where_torch_loads_no_backends() -> None:
    done = session.python(
        "-c", "import torch; print(hasattr(torch, 'npu'))", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.stdout.strip() == "False", done.stderr


def test_the_package_loads_itself_where_torch_did_not() -> None:
    done = session.python(
        "-c", "import torch, torch_npu; print(torch.ones(2).npu().device, torch_npu.__simulated__)",
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert done.stdout.strip() == "npu:0 True", done.stderr


def test_import_is_silent() -> None:
    done = session.python("-c", "import torch; torch.ones(2).npu() + 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
