"""Profiles: what is found on a device, and what is said when nothing is."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from envs import profiles
from envs.build import Builder, Environment
from envs.errors import EnvError
from envs.home import REPOSITORY


@pytest.fixture(autouse=True)
def _no_named_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*profiles.PYTHON_VARIABLES.values(), "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("engine", profiles.ENGINES)
def test_simnpu_is_our_environment_with_the_simulation_on_its_path(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ensure(self: Builder, name: str, progress: object = None) -> Environment:
        asked.append(name)
        return dataclasses.replace(self.environment(name), ready=True)

    monkeypatch.setattr(Builder, "ensure", ensure)
    found = profiles.resolve("simnpu", engine)
    assert asked == [engine]
    assert found.simulated
    assert found.pythonpath == (str(REPOSITORY), str(REPOSITORY / "envs" / "simnpu" / "path"))
    assert (Path(found.pythonpath[1]) / "torch_npu" / "__init__.py").is_file()
    assert found.env["OMP_NUM_THREADS"] == "1"
    assert found.env["HF_HUB_OFFLINE"] == "1"
    assert ("LMDEPLOY_SKIP_WARMUP" in found.env) == (engine == "lmdeploy")
    assert ("VLLM_VERSION" in found.env) == (engine == "vllm")
    assert found.versions[engine] in ("0.12.2", "0.23.0")


def test_number_of_threads_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(Builder, "ensure", lambda self, name, progress=None: self.environment(name))
    assert profiles.resolve("simnpu", "vllm").env["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("device", ["camb", "maca", "cpu"])
def test_known_but_unsupported_device_lists_those_that_work(device: str) -> None:
    with pytest.raises(EnvError, match=f"{device} .* is not supported yet") as caught:
        profiles.resolve(device, "vllm")
    assert "simnpu" in caught.value.hint
    assert "ascend" in caught.value.hint


@pytest.mark.parametrize("device", ["npu", "", "SIMNPU"])
def test_unknown_device_lists_those_that_work(device: str) -> None:
    with pytest.raises(EnvError, match=f"unknown device {device!r}") as caught:
        profiles.resolve(device, "lmdeploy")
    assert "simnpu" in caught.value.hint


def test_unknown_engine_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown engine 'sglang'"):
        profiles.resolve("simnpu", "sglang")


def _refused(engine: str = "lmdeploy") -> str:
    with pytest.raises(EnvError, match=r"^no Ascend device or interpreter found: ") as caught:
        profiles.resolve("ascend", engine)
    assert "LMDEPLOY_PYTHON=/path/to/python" in caught.value.hint
    assert "DEVICE=simnpu" in caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize("engine", profiles.ENGINES)
def test_ascend_without_a_named_interpreter(engine: str) -> None:
    assert f"{profiles.PYTHON_VARIABLES[engine]} is not set" in _refused(engine)


def test_ascend_interpreter_must_be_an_executable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_PYTHON", str(tmp_path / "absent"))
    assert "is not a file" in _refused()
    (tmp_path / "absent").write_text("#!/bin/sh\n")
    assert "is not executable" in _refused()


def _install(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a shell script as lmdeploy's interpreter."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LMDEPLOY_PYTHON", str(path))


def test_ascend_interpreter_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "echo boom >&2; exit 3", monkeypatch)
    assert "is no working Python: boom" in _refused()
    _install(tmp_path, "sleep 30", monkeypatch)
    monkeypatch.setattr(profiles, "EXAMINATION_S", 0.3)
    assert "did not answer within" in _refused()


def test_ascend_interpreter_must_be_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"python": [3, 9, 1], "errors": {}, "versions": {}, "device": false}'
    _install(tmp_path, f"echo 'ALIGN{answer}'", monkeypatch)
    assert "is Python 3.9.1, and 3.10 or later is needed" in _refused()


def _fake_image(directory: Path, monkeypatch: pytest.MonkeyPatch, available: bool, without: str = "") -> None:
    """An interpreter whose path holds empty engines and a ``torch_npu`` that sees a device or not."""
    for name in {"torch", "torch_npu", "lmdeploy", "dlinfer"} - {without}:
        module = f"class npu:\n    is_available = staticmethod(lambda: {available})\n"
        (directory / f"{name}.py").write_text(module if name == "torch_npu" else "")
    info = directory / "lmdeploy-0.12.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(textwrap.dedent("Metadata-Version: 2.1\nName: lmdeploy\nVersion: 0.12.2\n"))
    _install(directory, f'PYTHONPATH={directory} exec {sys.executable} -S "$@"', monkeypatch)


def test_ascend_needs_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_image(tmp_path, monkeypatch, available=True, without="dlinfer")
    assert "cannot import dlinfer: ModuleNotFoundError: No module named 'dlinfer'" in _refused()


def test_ascend_needs_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_image(tmp_path, monkeypatch, available=False)
    assert "sees no device" in _refused()


def test_ascend_finds_an_interpreter_and_adds_the_repository_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_image(tmp_path, monkeypatch, available=True)
    lines: list[str] = []
    found = profiles.resolve("ascend", "lmdeploy", lines.append)
    assert found.python == Path(os.environ["LMDEPLOY_PYTHON"])
    assert found.pythonpath == (str(REPOSITORY),)
    assert not found.simulated
    assert found.versions["lmdeploy"] == "0.12.2"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in found.env
    assert len(lines) == 1
