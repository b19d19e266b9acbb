"""Each condition made false and unreadable in turn, on either side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.base import RowSpan, StepRecord
from align.case.schema import CaseLayout
from align.conditions import LAUNCH, NAMES, TABLE, SideFacts, evaluate
from tests.unit.align.conditions.condition_sides import (
    CASE,
    CONFIG,
    FACTS,
    FALSE,
    FILES,
    IDS,
    RESIDUE,
    info,
    judged,
    not_ok,
    side,
)


def test_two_right_engines_meet_every_condition() -> None:
    found = judged()
    assert not_ok(found) == {}
    # A dense model has no routing.
    assert list(found) == [name for name in NAMES if name not in ("routing", "expert_placement")]


@pytest.mark.parametrize("role", ["candidate", "reference"])
@pytest.mark.parametrize("name", FALSE)
def test_each_false_condition_is_named_alone(name: str, role: str) -> None:
    found = (
        judged(candidate=side("lmdeploy", FALSE[name]))
        if role == "candidate"
        else judged(reference=side("vllm", FALSE[name]))
    )
    assert not_ok(found) == {name: "false"}
    condition = found[name]
    told = next(row.told for row in TABLE if row.name == name)
    assert condition.blocks is (told is None), "a configuration that is computed otherwise is a finding"
    assert condition.mend and condition.source and condition.where[role] and condition.sides == (role,)
    assert condition.why, "a verdict says what it rests on"


@pytest.mark.parametrize("hidden", [None, ...])
@pytest.mark.parametrize("name", FALSE)
def test_what_cannot_be_read_is_unknown_and_blocks(name: str, hidden: Any) -> None:
    facts = dict.fromkeys(FALSE[name], hidden)
    if name == "warmup":
        facts = dict.fromkeys(("start_residue", "cache_residue"), hidden)
    found = judged(reference=side("vllm", facts))
    assert not_ok(found) == {name: "unknown"}
    assert found[name].blocks


def test_the_table_is_covered_here() -> None:
    own = {"soc", "token_ids", "ascend_config", "checkpoint_files", "routing", "expert_placement", "numerics"}
    assert set(FALSE) | own == set(NAMES)


# --------------------------------------------------------------------------------------- those with tests of their own


def test_soc_of_one_generation() -> None:
    assert not_ok(judged(candidate=side("lmdeploy", {"soc_version": 220}))) == {}
    other = judged(candidate=side("lmdeploy", {"soc_version": 250}))
    assert not_ok(other) == {"soc": "false"}
    assert other["soc"].observed == {"candidate": "A3 (250)", "reference": "A2 (223)"}
    assert not_ok(judged(candidate=side("lmdeploy", {"soc_version": 7}))) == {"soc": "unknown"}


def test_ids_that_the_worker_saw() -> None:
    seen = {**IDS, "r1": (0, 6)}
    found = judged(candidate=side("lmdeploy", token_ids=seen))
    assert not_ok(found) == {"token_ids": "false"} and "r1: id 0 is 0, not 5" in found["token_ids"].why
    found = judged(candidate=side("lmdeploy", token_ids={**IDS, "r0": (1, 2, 3, 4, 4)}))
    assert "r0 has 5 ids, not 4" in found["token_ids"].why
    partly = {**IDS, "r0": (None, None, 3, 4)}
    for unseen in (None, {"r0": IDS["r0"]}, partly):
        assert not_ok(judged(candidate=side("lmdeploy", token_ids=unseen))) == {"token_ids": "unknown"}


def test_a_prefix_from_the_cache_is_not_read_again() -> None:
    partly = {**IDS, "r0": (None, None, 3, 4)}
    found = judged(candidate=side("lmdeploy", {"prefix_caching": True}, token_ids=partly))
    assert not_ok(found) == {"prefix_caching": "false"}
    assert "2 came from the prefix cache" in found["token_ids"].why
    wrong = judged(candidate=side("lmdeploy", {"prefix_caching": True}, token_ids={**IDS, "r0": (None, None, 4, 4)}))
    assert wrong["token_ids"].verdict == "false"


def test_checkpoint_files_are_compared_side_by_side() -> None:
    found = judged(reference=side("vllm", files={**FILES, "config.json": "cc"}))
    assert not_ok(found) == {"checkpoint_files": "false"} and "config.json differs" in found["checkpoint_files"].why
    found = judged(reference=side("vllm", files={"model.safetensors": "aa"}))
    assert "config.json is absent from the reference" in found["checkpoint_files"].why
    assert not_ok(judged(reference=side("vllm", files=None))) == {"checkpoint_files": "unknown"}


def test_switches_of_the_plugin_must_be_off() -> None:
    found = judged(reference=side("vllm", {"ascend_config": {"weight_nz_mode": 2, "enable_mlapo": False}}))
    assert not_ok(found) == {"ascend_config": "false"} and "weight_nz_mode=2" in found["ascend_config"].why
    assert not_ok(judged(reference=side("vllm", {"ascend_config": None}))) == {"ascend_config": "unknown"}


def test_other_numerics_inform_and_do_not_block() -> None:
    found = judged(candidate=side("lmdeploy", {"numerics": "fp32-internal"}))
    assert not_ok(found) == {"numerics": "false"}
    assert not found["numerics"].blocks


def test_routing_of_a_model_with_experts() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 48}
    config = {**CONFIG, **experts, "architectures": ["Qwen3MoeForCausalLM"]}
    placed = {"per_rank": 8, "order": "in a row by rank"}
    widths: dict[str, Any] = {"intermediate": {"expert": 48, "shared": 0}, "expert_placement": placed}
    right = {"routing": {"experts": 8, "top_k": 2, "renormalize": True}, **widths}
    wrong = {"routing": {"experts": 8, "top_k": 2, "renormalize": False}, **widths}
    moved = {**right, "expert_placement": {"per_rank": 8, "order": [1, 2, 3, 4, 5, 6, 7, 0]}}
    found = judged(side("lmdeploy", moved), side("vllm", right), config)
    assert not_ok(found) == {"expert_placement": "false"} and not found["expert_placement"].blocks
    narrow = {**right, "intermediate": {"expert": 24, "shared": 0}}
    assert not_ok(judged(side("lmdeploy", right), side("vllm", right), config)) == {}
    assert not_ok(judged(side("lmdeploy", wrong), side("vllm", right), config)) == {"routing": "false"}
    assert not_ok(judged(side("lmdeploy", widths), side("vllm", right), config)) == {"routing": "unknown"}
    assert not_ok(judged(side("lmdeploy", right), side("vllm", narrow), config)) == {"intermediate": "false"}


# ------------------------------------------------------------------------------------------------ subtler judgements


def test_dummies_that_left_nothing_are_no_objection() -> None:
    found = judged(candidate=side("lmdeploy", {"warmup_skipped": False, "dummy_forwards": 3}))
    assert found["warmup"].ok and "warm-up was on" in found["warmup"].why
    assert "nothing is left" in judged()["warmup"].why


def test_residue_on_one_rank_is_found_among_all() -> None:
    clean = {"elements": 0, "blocks": 0, "of_blocks": 8}
    found = judged(candidate=side("lmdeploy", {"start_residue": {"rank 0": clean, "rank 1": RESIDUE}}))
    assert not_ok(found) == {"warmup": "false"} and "7 elements in 1 of 16 blocks" in found["warmup"].why


def test_an_unread_cache_needs_proof_that_nothing_ran() -> None:
    hidden = {"start_residue": None, "cache_residue": None}
    assert judged(candidate=side("lmdeploy", hidden))["warmup"].ok  # warm-up skipped, no dummy forward
    for more in ({"dummy_forwards": 1}, {"warmup_skipped": False}, {"dummy_forwards": None}):
        assert not_ok(judged(candidate=side("lmdeploy", {**hidden, **more}))) == {"warmup": "unknown"}


def test_ranks_that_differ_are_false() -> None:
    found = judged(reference=side("vllm", {"norm_eps": {"rank 0": 1e-6, "rank 1": 1e-5}}))
    assert not_ok(found) == {"norm_eps": "false"}


def test_penalties_are_not_greedy() -> None:
    assert not_ok(judged(candidate=side("lmdeploy", {"penalties": True}))) == {"greedy": "false"}


def test_lmdeploy_splits_a_prefill_that_reaches_its_limit_and_vllm_does_not() -> None:
    assert not_ok(judged(candidate=side("lmdeploy", {"max_prefill_tokens": 6}))) == {"chunked_prefill": "false"}
    assert not_ok(judged(reference=side("vllm", {"max_prefill_tokens": 6}))) == {}


def test_a_split_prompt_is_seen_in_the_steps() -> None:
    steps = (
        StepRecord(0, "prefill", (RowSpan("r0", 0, 3),), {}),
        StepRecord(1, "prefill", (RowSpan("r0", 3, 1), RowSpan("r1", 0, 2)), {}),
    )
    found = judged(candidate=side("lmdeploy", steps=steps))
    assert not_ok(found) == {"chunked_prefill": "false"} and "positions 0–2 of r0" in found["chunked_prefill"].why


def test_a_prefix_that_is_kept_is_no_part_of_a_prompt() -> None:
    steps = (StepRecord(0, "prefill", (RowSpan("r0", 2, 2), RowSpan("r1", 0, 2)), {}),)
    kept = {"prefix_caching": True}
    assert not_ok(judged(candidate=side("lmdeploy", steps=steps))) == {"chunked_prefill": "false"}
    assert not_ok(judged(candidate=side("lmdeploy", kept, steps=steps))) == {"prefix_caching": "false"}
    parts = (StepRecord(0, "prefill", (RowSpan("r0", 2, 1), RowSpan("r1", 0, 2)), {}),)
    assert "chunked_prefill" in not_ok(judged(candidate=side("lmdeploy", kept, steps=parts)))


def test_a_request_that_is_computed_again_is_not_split() -> None:
    """After preemption: the prompt and what was generated, in one step."""
    steps = (
        StepRecord(0, "prefill", (RowSpan("r0", 0, 4), RowSpan("r1", 0, 2)), {}),
        StepRecord(3, "mixed", (RowSpan("r0", 0, 6, 1),), {}),
    )
    assert not_ok(judged(candidate=side("lmdeploy", steps=steps))) == {}


WINDOWED = {**CONFIG, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


def test_a_window_that_cuts_sequences_must_be_the_same_everywhere() -> None:
    """16 new tokens: the longest sequence has 20, and a window of 8 cuts it."""
    right = side("vllm", {"window": 8})
    ignoring = side("lmdeploy", {"window": 0, "window_cache": 8})
    found = judged(ignoring, right, WINDOWED)
    assert not_ok(found) == {"window": "false"}
    assert found["window"].requested == 8 and "no window" in found["window"].why
    assert not_ok(judged(side("lmdeploy", {"window": 8, "window_cache": 8}), right, WINDOWED)) == {}


def test_a_window_that_no_sequence_reaches_makes_no_difference() -> None:
    wide = {**WINDOWED, "sliding_window": 4096}
    found = judged(side("lmdeploy", {"window_cache": 4096}), side("vllm", {"window": 4096}), wide)
    assert not_ok(found) == {} and "makes no difference" in found["window"].why


def test_a_cache_that_drops_blocks_without_a_window_is_false() -> None:
    assert not_ok(judged(candidate=side("lmdeploy", {"window_cache": 8}))) == {"window": "false"}


def test_windows_of_some_layers_only() -> None:
    half = {**WINDOWED, "max_window_layers": 1}
    assert judged(side("lmdeploy", {"window": [0, 8]}), side("vllm", {"window": [0, 8]}), half)["window"].ok
    assert not_ok(judged(side("lmdeploy", {"window": 8}), side("vllm", {"window": [0, 8]}), half)) == {
        "window": "false"
    }


# ---------------------------------------------------------------------------------------------------------- the whole


def test_before_a_run_only_what_is_known_is_judged() -> None:
    early = ("greedy", "temperature", "top_k", "penalties")
    one, other = (side(engine, dict.fromkeys(early, ...), steps=(), token_ids=None) for engine in ("lmdeploy", "vllm"))
    found = judged(one, other, stage=LAUNCH)
    assert not_ok(found) == {}
    assert not {"greedy", "token_ids"} & set(found)


def test_one_side_alone_is_judged_against_the_request() -> None:
    from align.checkpoints.table import structure_of

    sides = {"candidate": side("lmdeploy", {"norm_eps": 1e-3})}
    found = evaluate(CASE, info(), structure_of(CONFIG), sides)
    assert {one.name for one in found if not one.ok} == {"norm_eps"}


def test_a_side_that_said_nothing_is_unknown_throughout() -> None:
    found = judged(candidate=SideFacts("lmdeploy"))
    assert {condition.verdict for name, condition in found.items() if name != "ascend_config"} == {"unknown"}
    assert not any(condition.ok for name, condition in found.items() if name != "ascend_config")


def test_allowed_conditions_do_not_block_but_taint() -> None:
    found = judged(candidate=side("lmdeploy", FALSE["norm_eps"]), allow={"norm_eps", "dtype"})
    assert not found["norm_eps"].blocks and found["norm_eps"].taints and found["norm_eps"].allowed
    assert not found["dtype"].taints


def test_the_result_is_json() -> None:
    for condition in judged(candidate=side("lmdeploy", FALSE["rope_frequencies"])).values():
        text = json.dumps(condition.to_dict())
        assert json.loads(text)["name"] == condition.name
        assert len(text) < 2000, "rows are for people"


def test_a_later_observation_replaces_an_earlier_one() -> None:
    from adapters.base import Observation

    facts = SideFacts("vllm", [Observation("a", 1, "x"), Observation("a", 2, "x")])
    found = facts.fact("a")
    assert found is not None and found.value == 2
    assert facts.fact("b") is None and set(FACTS) == {"lmdeploy", "vllm"}


def test_each_side_is_judged_by_its_own_layout() -> None:
    """An engine against itself: what counts is what each side read back, and a layout that was dropped is false."""
    own = CASE.model_copy(update={"layout": CaseLayout(tp=2, dp=2), "reference_layout": CaseLayout()})
    wide = {"tp": 2, "worker_tp": 2, "dp": 2, "worker_dp": 2}
    found = judged(side("lmdeploy", wide), side("lmdeploy"), case=own)
    for name in ("tp", "dp"):
        assert (found[name].verdict, found[name].requested) == ("ok", {"candidate": 2, "reference": 1})
    assert (found["ep"].verdict, found["ep"].requested) == ("ok", 1)
    dropped = {**wide, "dp": 1, "worker_dp": 1}
    found = judged(side("lmdeploy", dropped), side("lmdeploy"), case=own)
    assert (found["dp"].verdict, found["dp"].sides) == ("false", ("candidate",))
    found = judged(side("lmdeploy", wide), side("lmdeploy", wide), case=own)
    assert (found["tp"].verdict, found["tp"].sides) == ("false", ("reference",))
