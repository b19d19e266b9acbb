"""What is demanded of rope and windows, against transformers' own models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from align.checkpoints.table import structure_of
from align.conditions import judge
from align.conditions.requested import rope_frequencies, windows
from align.sentences import text_of
from tests.unit.align.conditions.condition_sides import CONFIG

LLAMA: dict[str, Any] = {
    **CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
]  # fmt: skip


@pytest.mark.parametrize(
    "scaling", SCALINGS, ids=lambda scaling: "default" if scaling is None else scaling["rope_type"]
)
def test_frequencies_are_those_of_the_model(scaling: dict[str, Any] | None) -> None:
    config = {**LLAMA, "rope_scaling": scaling}
    model = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    wanted = rope_frequencies(config, structure_of(config))
    # The model computes in float32.
    assert wanted["inv_freq"] == pytest.approx(model.inv_freq.double().tolist(), rel=1e-5)
    assert wanted["scale"] == pytest.approx(model.attention_scaling)


def test_an_unknown_type_expects_nothing() -> None:
    config = {**LLAMA, "rope_scaling": {"rope_type": "fope"}}
    wanted = rope_frequencies(config, structure_of(config))
    ok, why = judge.frequencies(wanted, {"inv_freq": [1.0], "resolution": [0.0], "scale": 1.0})
    assert ok is None and "fope" in text_of(why)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 0),
        ({"sliding_window": 64}, 0),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, [0, 64]),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, 0),
    ],
)
def test_windows_by_layer(changes: dict[str, Any], window: Any) -> None:
    config = {**CONFIG, **changes}
    assert windows(config, structure_of(config)) == window


def test_windows_of_a_model_that_transformers_does_not_know() -> None:
    config = {**CONFIG, "model_type": "not-known", "use_sliding_window": True, "sliding_window": 32}
    config["max_window_layers"] = 0
    assert windows(config, structure_of(config)) == 32


# ------------------------------------------------------------------------------------------------- judging frequencies


def measured(values: list[float], resolution: float = 1e-6, scale: float = 1.0) -> dict[str, Any]:
    return {"inv_freq": values, "resolution": [resolution] * len(values), "scale": scale}


def test_frequencies_within_the_resolution_are_equal() -> None:
    wanted = {"inv_freq": [1.0, 0.1], "scale": 1.0}
    assert judge.frequencies(wanted, measured([1.0, 0.1005], resolution=0.0078))[0] is True
    assert judge.frequencies(wanted, measured([1.0, 0.1005]))[0] is False
    assert judge.frequencies(wanted, measured([1.0]))[0] is False
    assert judge.frequencies(wanted, measured([1.0, 0.1], scale=1.1))[0] is False


def test_a_frequency_that_is_no_number_is_wrong() -> None:
    wanted = {"inv_freq": [1.0, 0.1], "scale": 1.0}
    assert judge.frequencies(wanted, measured([math.nan, 0.1]))[0] is False
    assert judge.frequencies(wanted, measured([1.0, 0.1], scale=math.nan))[0] is False


def test_float32_tables_are_within_the_slack() -> None:
    """What an engine computes in float32 for a large base and a wide head."""
    for base in (1e4, 1e6, 5e6):
        exponents = torch.arange(0, 256, 2, dtype=torch.float) / 256
        wanted = {"inv_freq": (base ** -exponents.double()).tolist(), "scale": 1.0}
        have = (1.0 / (base**exponents)).double().tolist()
        assert judge.frequencies(wanted, measured(have, resolution=0.0))[0] is True
