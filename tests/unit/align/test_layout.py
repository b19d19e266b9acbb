"""Layouts: which triples exist, which of them a model can take, and how the engines spell them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.layout import (
    RULES,
    Layout,
    dp_groups,
    engine_flags,
    ep_groups,
    expert_rules,
    groups,
    layout_of_flags,
    parse_layout,
    place_of,
    tp_groups,
)
from align.layout.rules import flags_table, help_text, rules_table
from envs.home import REPOSITORY

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


# ---------------------------------------------------------------------------------------------------------- groups


def test_the_groups_of_two_by_two() -> None:
    layout = Layout(2, 2, 4)
    assert tp_groups(layout) == ((0, 1), (2, 3))
    assert dp_groups(layout) == ((0, 2), (1, 3))
    assert ep_groups(layout) == ((0, 1, 2, 3),)
    assert ep_groups(Layout(2, 2)) == ((0,), (1,), (2,), (3,))


@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_every_rank_is_in_one_group_of_each_dimension_at_its_place(tp: int, dp: int, experts: bool) -> None:
    layout = Layout(tp, dp, tp * dp if experts else 1)
    for name, found in groups(layout).items():
        assert sorted(rank for group in found for rank in group) == list(range(layout.world))
        for group in found:
            assert len(group) == getattr(layout, name)
            for at, rank in enumerate(group):
                place = place_of(layout, rank)
                assert {"tp": place.tp_rank, "dp": place.dp_rank, "ep": place.ep_rank}[name] == at
    with pytest.raises(ValueError, match="has no rank"):
        place_of(layout, layout.world)


# ----------------------------------------------------------------------------------------------------------- flags


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.sampled_from(["lmdeploy", "vllm"]))
def test_flags_and_layouts_are_each_others_inverse(tp: int, dp: int, experts: bool, engine: str) -> None:
    layout = Layout(tp, dp, tp * dp if experts else 1)
    assert layout_of_flags(engine_flags(layout, engine), engine) == layout


@pytest.mark.parametrize(
    ("engine", "flags", "layout"),
    [
        ("lmdeploy", ("--tp", "4", "--dp", "2"), Layout(2, 2)),
        ("lmdeploy", ("--tp=4", "--dp=2", "--ep=8"), Layout(4, 2, 8)),
        ("lmdeploy", ("--model", "x", "--tp", "2"), Layout(2)),
        ("lmdeploy", (), Layout()),
        ("vllm", ("-tp", "2", "-dp", "2", "--eager"), Layout(2, 2)),
        ("vllm", ("-tp", "2", "-ep"), Layout(2, 1, 2)),
        ("vllm", ("--enable-expert-parallel",), Layout()),
    ],
)
def test_what_engines_make_of_their_flags(engine: str, flags: tuple[str, ...], layout: Layout) -> None:
    assert layout_of_flags(flags, engine) == layout


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--tp", "1", "--dp", "2"), "drops --dp 2 silently"),
        (("--tp", "3", "--dp", "2"), "--dp must divide it"),
        (("--tp", "2", "--dp", "2", "--ep", "2"), "tp × dp"),
        (("--tp", "many"), "--tp many is no size"),
        (("--tp",), "--tp without a value is no size"),
    ],
)
def test_flags_that_lmdeploy_does_not_do_are_refused_with_the_rule(flags: tuple[str, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        layout_of_flags(flags, "lmdeploy")


def test_another_engine_takes_no_layout() -> None:
    with pytest.raises(ValueError, match="takes no layout; valid: lmdeploy, vllm"):
        layout_of_flags((), "transformers")


# ------------------------------------------------------------------------------------------------- text, and rules


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp2", Layout(2)),
        (" TP2 dp=2 ", Layout(2, 2)),
        ("ep4 tp2dp2", Layout(2, 2, 4)),
        (str(Layout(2, 3)), Layout(2, 3)),
    ],
)
def test_a_layout_as_typed(text: str, layout: Layout) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(layout.name.replace("_", " ")) == layout


@pytest.mark.parametrize("text", ["", " ", "2", "tp", "tp2 tp4", "pp2", "tp2,dp2", "tp0", "tp2 ep3"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"valid|positive"):
        parse_layout(text)


#: Rule as it is shown → a layout that breaks it, with what the model has otherwise.
BROKEN: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp must divide num_attention_heads": (Layout(3), {}),
    "tp must divide num_key_value_heads or be a multiple of it": (
        Layout(2),
        {"num_attention_heads": 12, "num_key_value_heads": 3},
    ),
    "tp must divide intermediate_size": (Layout(4), {"intermediate_size": 514}),
    "ep must be 1 for a model without experts": (Layout(2, 1, 2), {}),
    "ep must divide the number of experts": (Layout(2, 1, 2), {"num_experts": 3}),
}


@pytest.mark.parametrize("rule", [one.rule for one in RULES if one.of == "model"])
def test_the_rules_that_are_shown_are_those_that_refuse(rule: str) -> None:
    """A refusal begins with the words of its rule."""
    layout, change = BROKEN[rule]
    with pytest.raises(ValueError, match=f"^{rule.partition(' or be')[0]}"):
        layout.check_model({**QWEN3, **change})


def test_the_tables_are_in_the_readme_and_in_the_help() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert flags_table() in readme and rules_table() in readme
    said = " ".join(help_text().replace("\b", "").split())
    assert all(" ".join(one.rule.split()) in said for one in RULES)
    assert " ".join(engine_flags(Layout(2, 2), "lmdeploy")) in said
    assert max(map(len, help_text().splitlines())) <= 78


def test_what_an_engine_demands_of_spread_experts() -> None:
    (rule,) = expert_rules("lmdeploy", Layout(1, 2, 2))
    assert "A3" in rule
    assert expert_rules("lmdeploy", Layout(2)) == () and expert_rules("vllm", Layout(1, 2, 2)) == ()
