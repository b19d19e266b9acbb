"""Both sides' calls beside each other: other words for the same are benign and named, anything else is different."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from align.attention.beside import BENIGN, DIFFERENT, EQUAL, Row, beside, compare
from align.attention.tables import rows_of
from align.fa import Call
from align.fa.files import Step
from tests.unit.align.attention.recorded_calls import MODEL, atb, atb_paged, call, fused, left, paged, steps


def rows(candidate: Call, reference: Call, step: Step) -> dict[str, Row]:
    known = MODEL.context(step, 0)
    return {one.name: one for one in compare(replace(candidate, context=known), replace(reference, context=known))}


PREFILL, DECODE = steps("prefill"), steps("decode")


@pytest.mark.parametrize(
    ("mine", "theirs", "step"), [(atb(), fused(), PREFILL), (atb_paged(), paged(), DECODE), (fused(), fused(), PREFILL)]
)
def test_engines_that_say_the_same_have_no_difference(mine: Call, theirs: Call, step: Step) -> None:
    found = rows(mine, theirs, step)
    assert {one.verdict for one in found.values()} <= {EQUAL, BENIGN}
    known = {row["id"] for row in rows_of("benign.tsv")}
    assert all(one.why in known for one in found.values() if one.verdict == BENIGN)


def test_each_benign_difference_has_its_name() -> None:
    prefill, decode = rows(atb(), fused(), PREFILL), rows(atb_paged(), paged(), DECODE)
    assert (prefill["operator"].why, prefill["q_lengths"].why, prefill["mask"].why) == (
        "operator",
        "cumulative",
        "mask",
    )
    assert (decode["key"].why, decode["block_table"].why, decode["block_size"].why) == ("view", "", "no_such")
    v2 = call("npu_fused_infer_attention_score_v2", query="bf16[8,4,128]", key="bf16[8,2,128]", value="bf16[8,2,128]",
              num_query_heads=4, num_key_value_heads=2, softmax_scale=MODEL.scale, input_layout="TND", sparse_mode=3,
              atten_mask="bool[1,2048,2048]=causal", actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8])  # fmt: skip
    found = rows(v2, fused(), PREFILL)
    assert {one.name: one.why for one in found.values() if one.verdict != EQUAL} == {
        "operator": "operator",
        "mask": "mask",
    }


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"scale": 0.1}, "scale"),
        ({"num_key_value_heads": 4, "key": "bf16[8,4,128]", "value": "bf16[8,4,128]"}, "kv_heads"),
        ({"actual_seq_lengths": [4, 8]}, "q_lengths"),
        ({"atten_mask": "int8[2048,2048]=past"}, "mask"),
        ({"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}, "mask"),
    ],
)
def test_what_means_something_else_is_different(changed: dict[str, Any], name: str) -> None:
    assert rows(atb(), fused(**changed), PREFILL)[name].verdict == DIFFERENT


def test_tokens_that_are_sequences_of_their_own_are_the_same_tokens() -> None:
    step = Step(0, 1, 0, "prefill", (replace(steps("prefill").rows[0], start=5),))
    own = call("npu_fused_infer_attention_score", query="bf16[3,1,512]", key="bf16[6,128,256]", value="bf16[6,128,256]",
               atten_mask="bool[3,128]=shows [6,7,8]", block_table="int32[3,1]=[2,2,2]", block_size=128,
               actual_seq_lengths_kv=[8, 8, 8], num_heads=4, num_key_value_heads=2, scale=MODEL.scale)  # fmt: skip
    whole = paged(
        query="bf16[3,4,128]", actual_seq_lengths=[3], actual_seq_lengths_kv=[8], block_table="int32[1,1]=[4]"
    )
    found = rows(own, whole, step)
    assert not [one for one in found.values() if one.verdict == DIFFERENT]
    assert (found["layout"].why, found["kv_lengths"].why) == ("layout", "token_rows")
    wrong = replace(
        own, arguments={**own.arguments, "atten_mask": call("x", m="bool[3,128]=shows [6,8,8]").arguments["m"]}
    )
    assert rows(wrong, whole, step)["mask"].verdict == DIFFERENT


def test_steps_with_the_same_rows_are_paired_and_layers_grouped(tmp_path: Path) -> None:
    mine = left(
        tmp_path / "a", {steps("prefill"): [(atb(), (0, 1, 2))], steps("decode", 2): [(atb_paged(), (0, 1, 2))]}
    )
    theirs = left(
        tmp_path / "b",
        {
            steps("prefill"): [(fused(), (0, 2)), (fused(scale=1.0), (1,))],
            steps("decode", 1): [(paged(), (0, 1, 2))],
            steps("decode", 1, run=2): [(paged(), (0, 1, 2))],
        },
    )
    found = beside({"candidate": mine, "reference": theirs}, {"candidate": MODEL, "reference": MODEL})
    assert [(one.phase, one.layers) for one in found] == [("prefill", (0, 2)), ("prefill", (1,)), ("decode", (0, 1, 2))]
    assert found[2].steps == {"candidate": 2, "reference": 1}
    assert [row.name for row in found[1].different] == ["scale"]
    assert beside({"candidate": mine}, {"candidate": MODEL}) == ()


def test_the_same_requests_in_another_order_are_the_same_lengths() -> None:
    known = MODEL.context(PREFILL, 0)
    turned = MODEL.context(replace(PREFILL, rows=PREFILL.rows[::-1]), 0)
    mine = replace(fused(), context=known)
    theirs = replace(fused(actual_seq_lengths=[5, 8], actual_seq_lengths_kv=[5, 8]), context=turned)
    found = {one.name: one for one in compare(mine, theirs)}
    assert found["q_lengths"].verdict == found["kv_lengths"].verdict == BENIGN
