"""An engine that computes with another configuration than its checkpoint's is a finding, and does not stop the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from align.checkpoints.table import structure_of
from align.conditions import refuse, with_configuration
from align.conditions.told import configuration_findings
from align.findings import Finding
from align.sentences import text_of
from tests.unit.align.conditions.condition_sides import CONFIG, FALSE, judged, side

ROPE = FALSE["rope_frequencies"]


def conditions(changes: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    return tuple(judged(reference=side("vllm", changes, **options)).values())


def operator(checkpoint: str, who: str = "reference") -> Finding:
    return Finding("B", "operator", side=who, checkpoint=checkpoint)


def test_what_nobody_asked_for_is_a_finding() -> None:
    found = conditions({**FALSE["norm_eps"], **ROPE})
    refuse(found)  # does not stop
    norm, rope = configuration_findings(found)
    assert (norm.path, norm.kind, norm.side, norm.checkpoint) == (
        "B",
        "configuration",
        "reference",
        "layers.0.attn_norm",
    )
    assert rope.checkpoint == "layers.0.attn.q_rope"
    (said,) = norm.evidence["conditions"]
    assert (said["condition"], said["requested"], said["observed"]) == ("norm_eps", 1e-6, 0.001)
    assert "norm_eps" in norm.evidence["what"] and said["where"] in norm.next
    assert norm.evidence["what"] == text_of(norm.evidence["sentence"])
    assert text_of(rope.evidence["sentence"], "zh").startswith(
        "运行中引擎的 rope_frequencies 与 config.json 不同：参考侧：通道 "
    )


def test_a_model_with_norms_behind_its_blocks_calls_them_otherwise() -> None:
    found = conditions({**FALSE["norm_eps"], "norm_eps_unlike": [["model.layers.1.post_attention_layernorm", 0.001]]})
    (plain,) = configuration_findings(found)
    (sandwich,) = configuration_findings(found, replace(structure_of(CONFIG), tags=("all", "gqa", "dense", "sandwich")))
    assert (plain.checkpoint, sandwich.checkpoint) == ("layers.1.mlp_norm", "layers.1.attn.post_norm")


def test_what_an_option_asked_for_stops() -> None:
    found = conditions(FALSE["norm_eps"], options={"hf_overrides": {"rms_norm_eps": 0.001}})
    assert configuration_findings(found) == []
    assert [one.name for one in found if one.blocks] == ["norm_eps"]


def test_what_is_unknown_on_the_other_side_stops() -> None:
    found = tuple(
        judged(candidate=side("lmdeploy", {"norm_eps": None}), reference=side("vllm", FALSE["norm_eps"])).values()
    )
    assert [one.name for one in found if one.blocks] == ["norm_eps"]


def test_what_was_allowed_is_no_finding_but_taints() -> None:
    found = tuple(judged(reference=side("vllm", FALSE["norm_eps"]), allow={"norm_eps"}).values())
    assert configuration_findings(found) == []
    assert [one.name for one in found if one.taints] == ["norm_eps"]


def test_an_attention_scale_is_of_the_path_of_flash_attention() -> None:
    (found,) = configuration_findings(conditions(FALSE["attention_scale"]))
    assert (found.path, found.checkpoint) == ("FA", "layers.0.attn.out")


@pytest.mark.parametrize(
    ("others", "place"),
    [
        ([], 0),
        ([Finding("INPUT", "token_ids")], 1),
        ([operator("layers.0.attn.q_rope"), operator("layers.0.attn.k_rope")], 1),
        ([operator("layers.0.attn_norm"), operator("layers.0.attn.k_rope")], 2),
        ([operator("layers.0.attn.q_rope", "candidate")], 0),
    ],
)
def test_it_stands_behind_the_operator_that_it_explains(others: list[Finding], place: int) -> None:
    found = with_configuration(others, conditions(ROPE))
    assert [one.kind for one in found].index("configuration") == place
    assert [one for one in found if one.kind != "configuration"] == others


@pytest.mark.parametrize(
    ("name", "changes", "checkpoint"),
    [
        ("norm_eps", ["model.layers.1.post_attention_layernorm", 0.001], "layers.1.mlp_norm"),
        ("norm_eps", ["model.layers.0.self_attn.k_norm", 0.001], "layers.0.attn.k_norm"),
        ("norm_eps", ["model.norm", 0.001], "final_norm"),
        ("norm_eps", ["model.layers.1.input_layernorm", 1e-6], "layers.0.attn_norm"),  # most are wrong
        ("attention_scale", ["model.layers.1.self_attn.attn", 0.3], "layers.1.attn.out"),
    ],
)
def test_the_layer_that_is_wrong_is_named(name: str, changes: list[Any], checkpoint: str) -> None:
    found = conditions({**FALSE[name], f"{name}_unlike": [changes]})
    (one,) = configuration_findings(found)
    assert (one.checkpoint, one.layer) == (checkpoint, int(checkpoint[7]) if "layers" in checkpoint else None)
    wrong = changes[1] != 1e-6
    assert one.evidence["places"] == ([changes[0]] if wrong else [])
    assert (changes[0] in one.evidence["what"]) is wrong
