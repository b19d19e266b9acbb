"""Names of options are checked against the engine's own types before the engine is imported or built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapters.base import EngineSpec
from adapters.lmdeploy.adapter import LmdeployAdapter
from adapters.mistakes import Mistake
from adapters.vllm.adapter import VllmAdapter


@dataclass
class EngineOptions:
    block_size: int = 16
    top_k: int = 0  # only here, so that the two namespaces cannot stand in for each other


@dataclass
class SamplingOptions:
    top_p: float = 1.0


class Struct:
    """As msgspec declares its fields."""

    __struct_fields__ = ("top_p", "_private")


class LLM:
    def __init__(self, model: str, *, chat_template: str | None = None, **kwargs: Any) -> None:
        raise LookupError("the engine is built")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    for name in ("LMDEPLOY_SKIP_WARMUP", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "1")  # restored after what an adapter sets
    modules: dict[str, dict[str, Any]] = {
        "lmdeploy": {"__path__": []},
        "lmdeploy.messages": {"PytorchEngineConfig": EngineOptions, "GenerationConfig": SamplingOptions},
        "vllm": {"__path__": [], "LLM": LLM, "SamplingParams": Struct},
        "vllm.engine": {"__path__": []},
        "vllm.engine.arg_utils": {"EngineArgs": EngineOptions},
        "adapters.vllm.forcing": {"ForcingProcessor": object},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def launch(adapter: Callable[[], Any], option: str) -> None:
    made = adapter()
    spec = EngineSpec(made.name, "candidate", "/m", "bfloat16", "/w", options={option: 1})
    made.launch(spec, lambda stage, detail="": None)


@pytest.mark.parametrize("adapter", [LmdeployAdapter, VllmAdapter])
@pytest.mark.parametrize(
    ("option", "near"),
    [("blok_size", "block_size"), ("sampling.top_pp", "sampling.top_p"), ("sampling.top_k", "sampling.top_p")],
)
def test_a_misspelt_option_is_refused(adapter: Callable[[], Any], option: str, near: str) -> None:
    with pytest.raises(Mistake, match=f"has no option {option}; did you mean {near}\\?") as caught:
        launch(adapter, option)
    assert f"--set candidate.{option}" in caught.value.hint


def test_private_fields_are_no_options() -> None:
    with pytest.raises(Mistake, match=r"vllm has no option sampling\._private"):
        launch(VllmAdapter, "sampling._private")


@pytest.mark.parametrize("option", ["block_size", "sampling.top_p"])
def test_known_options_go_on_to_the_engine(option: str) -> None:
    with pytest.raises(ImportError, match=r"lmdeploy\.pytorch"):
        launch(LmdeployAdapter, option)


def test_what_llm_takes_itself_is_known() -> None:
    adapter = VllmAdapter()
    adapter._cache_bytes = lambda spec: 0  # type: ignore[method-assign]
    spec = EngineSpec("vllm", "candidate", "/m", "bfloat16", "/w", options={"chat_template": "x", "block_size": 1})
    with pytest.raises(LookupError, match="the engine is built"):
        adapter.launch(spec, lambda stage, detail="": None)
