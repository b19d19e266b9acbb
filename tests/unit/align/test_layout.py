"""Layouts: which triples exist, which of them a model can take, and how the engines spell them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.layout import Layout, engine_flags

QWEN3 = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}


@pytest.mark.parametrize(
    ("triple", "world", "text"),
    [((1, 1, 1), 1, "tp1 dp1 ep1"), ((2, 1, 1), 2, "tp2 dp1 ep1"), ((2, 3, 6), 6, "tp2 dp3 ep6")],
)
def test_world_and_text(triple: tuple[int, int, int], world: int, text: str) -> None:
    layout = Layout(*triple)
    assert layout.world == world
    assert str(layout) == text


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None])
@pytest.mark.parametrize("name", ["tp", "dp", "ep"])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        Layout(**{name: value})


@given(tp=st.integers(1, 8), dp=st.integers(1, 8), ep=st.integers(1, 64))
def test_expert_parallel_is_one_or_the_world(tp: int, dp: int, ep: int) -> None:
    if ep in (1, tp * dp):
        assert Layout(tp, dp, ep).ep == ep
    else:
        with pytest.raises(ValueError, match=r"ep must be 1 or tp\*dp.*valid: 1"):
            Layout(tp, dp, ep)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_model_accepts_divisors(tp: int) -> None:
    Layout(tp).check_model(QWEN3)


@pytest.mark.parametrize(
    ("tp", "change", "rule", "valid"),
    [
        (3, {}, r"divide num_attention_heads \(4\)", "1, 2, 4"),
        (8, {}, r"divide num_attention_heads \(4\)", "1, 2, 4"),
        (
            2,
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            r"num_key_value_heads \(3\)",
            "1, 3, 6, 12",
        ),
        (4, {"intermediate_size": 514}, r"divide intermediate_size \(514\)", "1, 2"),
    ],
)
def test_model_refuses_by_the_rule(tp: int, change: dict[str, int], rule: str, valid: str) -> None:
    with pytest.raises(ValueError, match=rf"{rule}.*got tp={tp}; valid tp: {valid}$"):
        Layout(tp).check_model({**QWEN3, **change, "intermediate_size": change.get("intermediate_size", 12 * 64)})


def test_missing_kv_heads_mean_all_heads() -> None:
    Layout(4).check_model({"num_attention_heads": 4, "intermediate_size": 8})


def test_experts_only_for_models_that_have_them() -> None:
    with pytest.raises(ValueError, match="without experts"):
        Layout(2, 1, 2).check_model(QWEN3)
    Layout(2, 1, 2).check_model({**QWEN3, "num_experts": 8})
    with pytest.raises(ValueError, match=r"number of experts \(9\).*valid ep: 1, 3, 9"):
        Layout(2, 1, 2).check_model({**QWEN3, "n_routed_experts": 9})


@pytest.mark.parametrize(
    ("layout", "lmdeploy", "vllm"),
    [
        (Layout(2, 1, 1), "--tp 2 --dp 1", "--tensor-parallel-size 2 --data-parallel-size 1"),
        (Layout(2, 2, 1), "--tp 4 --dp 2", "--tensor-parallel-size 2 --data-parallel-size 2"),
        (
            Layout(2, 2, 4),
            "--tp 2 --dp 2 --ep 4",
            "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel",
        ),
    ],
)
def test_engine_flags(layout: Layout, lmdeploy: str, vllm: str) -> None:
    assert " ".join(engine_flags(layout, "lmdeploy")) == lmdeploy
    assert " ".join(engine_flags(layout, "vllm")) == vllm


def test_unknown_engine_has_no_flags() -> None:
    with pytest.raises(ValueError, match="valid: lmdeploy, vllm"):
        engine_flags(Layout(), "transformers")
