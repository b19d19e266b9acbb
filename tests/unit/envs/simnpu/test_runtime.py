"""torch.npu beside tensors: devices, streams, events, memory, graphs; and what can be chosen by environment."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.envs.simnpu import session

SCRIPT = Path(__file__).with_name("runtime_checks.py")
OTHER = {"ALIGN_SIMNPU_SOC": "a3", "ALIGN_SIMNPU_DEVICES": "4", "ALIGN_SIMNPU_MEMORY_GIB": "2"}


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, str]]:
    default, other = session.run_together(SCRIPT, envs=[{}, OTHER])
    return {"default": default, "other": other}


@pytest.mark.parametrize("settings", ["default", "other"])
@pytest.mark.parametrize("name", session.names(SCRIPT))
def test_runtime(reports: dict[str, dict[str, str]], name: str, settings: str) -> None:
    assert not reports[settings][name], reports[settings][name]


# ------------------------------------------------------------------------------------------------------- settings


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The settings of a process with these environment variables; the module needs no device and no torch."""

    def fresh(**variables: str) -> Any:
        spec = importlib.util.spec_from_file_location(
            "simnpu_settings", session.SIMNPU / "torch_npu" / "_sim" / "settings.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "simnpu_settings", module)
        spec.loader.exec_module(module)
        for name in ("SOC", "DEVICES", "MEMORY_GIB"):
            monkeypatch.delenv(f"ALIGN_SIMNPU_{name}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"ALIGN_SIMNPU_{name}", value)
        return module.load()

    return fresh


def test_defaults(load: Callable[..., Any]) -> None:
    settings = load()
    assert settings.soc.generation == "A2"
    assert settings.device_count == 8
    assert settings.memory_bytes == 16 << 30


@pytest.mark.parametrize(("text", "low", "high"), [("A2", 220, 225), ("A3", 250, 255), ("a3", 250, 255)])
def test_generations(load: Callable[..., Any], text: str, low: int, high: int) -> None:
    soc = load(SOC=text).soc
    assert soc.generation == text.upper()
    assert low <= soc.version <= high


@pytest.mark.parametrize("text", ["", "A1", "910B", "A2 "])
def test_unknown_generations_are_refused(load: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"ALIGN_SIMNPU_SOC=.* is not one of A2, A3"):
        load(SOC=text)


@pytest.mark.parametrize("name", ["DEVICES", "MEMORY_GIB"])
@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "²", " 3"])
def test_numbers_that_are_none_are_refused(load: Callable[..., Any], name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"ALIGN_SIMNPU_{name}=.* is not a positive whole number; unset it"):
        load(**{name: text})


def test_numbers(load: Callable[..., Any]) -> None:
    settings = load(DEVICES="2", MEMORY_GIB="1")
    assert (settings.device_count, settings.memory_bytes) == (2, 1 << 30)


def test_a_wrong_setting_stops_the_import_of_torch() -> None:
    done = session.python("-c", "import torch", env={"ALIGN_SIMNPU_SOC": "A7"})
    assert done.returncode != 0
    assert "ALIGN_SIMNPU_SOC='A7' is not one of A2, A3" in done.stderr
