"""Interpreters of an image, played by scripts."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from align.doctor import ascend
from align.doctor.types import Needs
from envs.profiles import PYTHON_VARIABLES
from tests.unit.align.doctor.fakes import machine

RAY = version("ray")
OWN = list(sys.version_info[:2])
GOOD = {"python": [3, 11, 9], "errors": {}, "versions": {"torch": "2.9.0", "torch_npu": "2.9.0"}, "device": True}


@pytest.fixture(autouse=True)
def _no_named_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PYTHON_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def interpreter(path: Path, answer: object, ray: object = None) -> Path:
    """A program that answers both questions that are asked of an interpreter."""
    first, second = (f"ALIGN{json.dumps(value)}" for value in (answer, [OWN, RAY] if ray is None else ray))
    path.write_text(f"#!/bin/sh\ncase \"$2\" in *'version(\"ray\")'*) echo '{second}';; *) echo '{first}';; esac\n")
    path.chmod(0o755)
    return path


def test_on_the_simulated_device_nothing_is_asked(tmp_path: Path) -> None:
    assert list(ascend.examine(machine(tmp_path), Needs())) == []


def test_device_nodes(tmp_path: Path) -> None:
    assert ascend.device_nodes(tmp_path).state == "missing"
    (tmp_path / "davinci_manager").touch()
    assert ascend.device_nodes(tmp_path).state == "missing"
    (tmp_path / "davinci0").touch()
    assert ascend.device_nodes(tmp_path).found == f"1 in {tmp_path}: davinci0"


def test_no_interpreter_is_named(tmp_path: Path) -> None:
    found = {check.name: check for check in ascend.examine(machine(tmp_path, device="ascend"), Needs())}
    assert set(found) == {"NPU", "lmdeploy interpreter", "vllm interpreter"}
    assert found["vllm interpreter"].state == "missing"
    assert found["vllm interpreter"].found.startswith("VLLM_PYTHON is not set")
    assert found["vllm interpreter"].mend == "export VLLM_PYTHON=/path/to/python"


def test_an_interpreter_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PYTHON_VARIABLES.values():
        monkeypatch.setenv(name, str(interpreter(tmp_path / name, GOOD)))
    found = {check.name: check for check in ascend.examine(machine(tmp_path, device="ascend"), Needs())}
    assert [found[name].state for name in ("lmdeploy interpreter", "vllm interpreter")] == ["ok", "ok"]
    assert "torch_npu 2.9.0" in found["vllm interpreter"].found
    assert [found[name].state for name in ("Ray of lmdeploy", "Ray of vllm")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("change", "words", "mend"),
    [
        ({"python": [3, 9, 1]}, "Python 3.9.1", "export VLLM_PYTHON="),
        ({"errors": {"torch_npu": "ImportError: libhccl.so"}}, "cannot import torch_npu", "source /usr/local/Ascend"),
        ({"device": False}, "sees no device", "npu-smi info"),
    ],
)
def test_an_interpreter_that_lacks_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str, mend: str
) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(interpreter(tmp_path / "python", {**GOOD, **change})))
    found = ascend.interpreter("vllm")
    assert (found.state, words in found.found, found.mend.startswith(mend)) == ("missing", True, True), found


def test_an_interpreter_that_is_not_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = interpreter(tmp_path / "python", GOOD)
    path.chmod(0o644)
    monkeypatch.setenv("VLLM_PYTHON", str(path))
    monkeypatch.setattr("os.access", lambda file, mode: False)  # root may execute nothing either, but is not told so
    assert "is not executable" in ascend.interpreter("vllm").found


@pytest.mark.parametrize(
    ("ray", "words", "mend"),
    [
        ([OWN, "2.1.0"], "2.1.0, a joint run needs", f"-m pip install ray=={RAY}"),
        ([[3, 10], RAY], "Python 3.10", "align capture vllm"),
    ],
)
def test_another_ray_or_python(tmp_path: Path, ray: object, words: str, mend: str) -> None:
    found = ascend.same_ray("vllm", interpreter(tmp_path / "python", GOOD, ray))
    assert (found.state, words in found.found, mend in found.mend) == ("missing", True, True)


def test_this_interpreter_has_the_drivers_ray() -> None:
    assert ascend.same_ray("vllm", Path(sys.executable)).state == "ok"


def test_no_ray(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho PackageNotFoundError >&2; exit 1\n")
    path.chmod(0o755)
    found = ascend.same_ray("vllm", path)
    assert (found.state, found.found.startswith("not installed")) == ("missing", True)
