"""What a transplant takes, and which accusations can be tried at all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from align.checkpoints.table import structure_of
from align.errors import UserError
from align.findings import Finding
from align.walk.transplant import Accusation, NotPossibleError, accusation_in, accusation_of, known_of, plan_transplant
from tests.unit.align.compare import traces

ONE, TWO = structure_of(traces.CONFIG), structure_of(traces.CONFIG, 2)


@pytest.mark.parametrize(
    ("checkpoint", "inputs", "near"),
    [
        ("embed", (), "layers.1.block_in"),
        ("layers.0.block_in", ("embed",), "layers.1.block_in"),
        ("layers.0.mlp_norm", ("layers.0.mid",), "layers.1.block_in"),
        ("layers.1.mlp_norm", ("layers.1.mid",), "final_in"),
        (
            "layers.1.attn.out",
            ("layers.1.attn.q_rope", "layers.1.attn.key_states", "layers.1.attn.value_states"),
            "final_in",
        ),
        ("layers.1.block_in", ("layers.0.mid", "layers.0.mlp.down"), "final_in"),
        ("final_norm", ("final_in",), None),
        ("logits", ("final_norm",), None),
    ],
)
def test_inputs_output_and_where_it_is_read(checkpoint: str, inputs: tuple[str, ...], near: str | None) -> None:
    plan = plan_transplant(ONE, Accusation("reference", checkpoint))
    assert (plan.side, plan.checkpoint, plan.output, plan.inputs) == ("reference", checkpoint, checkpoint, inputs)
    assert plan.points == ("logits",) + (() if near is None else (near,))


def test_the_summands_of_every_residual_that_is_replaced() -> None:
    plan = plan_transplant(ONE, Accusation("candidate", "layers.1.attn_norm"))
    assert plan.summands == {"layers.1.block_in": ("layers.0.mid", "layers.0.mlp.down")}
    assert plan.names == (
        "layers.1.block_in", "layers.1.attn_norm", "layers.0.mid", "layers.0.mlp.down", "logits", "final_in",
    )  # fmt: skip
    assert plan_transplant(ONE, Accusation("candidate", "layers.0.attn_norm")).summands == {}
    assert set(plan_transplant(ONE, Accusation("candidate", "layers.1.mid")).summands) == {
        "layers.1.block_in",
        "layers.1.mid",
    }


def test_a_summand_of_a_rank_becomes_its_sum() -> None:
    plan = plan_transplant(TWO, Accusation("candidate", "layers.0.mlp.down_partial"))
    assert (plan.output, plan.inputs) == ("layers.0.mlp.down", ("layers.0.mlp.act",))
    assert "layers.0.mlp.down was replaced" in plan.notes[0]


@pytest.mark.parametrize(
    ("structure", "checkpoint", "why"),
    [
        (ONE, "layers.0.attn.kv_start_indices", "no inverse"),
        (TWO, "layers.0.mlp.down", "no inverse"),
        (ONE, "layers.0.mlp.down_partial", "does not exist"),
        (ONE, "layers.2.mlp.down", "does not exist"),
        (ONE, "layer0_mlp_out", "not a checkpoint"),
    ],
)
def test_what_cannot_be_tried(structure: Any, checkpoint: str, why: str) -> None:
    with pytest.raises(NotPossibleError, match=why):
        plan_transplant(structure, Accusation("candidate", checkpoint))


def test_an_accusation_is_a_side_and_a_checkpoint() -> None:
    assert accusation_of("candidate:layers.1.mlp.up") == Accusation("candidate", "layers.1.mlp.up")
    for text in ("layers.1.mlp.up", "both:layers.1.mlp.up", "candidate:", "candidate:layers.1.mlp.sideways", ""):
        with pytest.raises(UserError) as caught:
            accusation_of(text)
        assert "--confirm candidate:layers.1.mlp.up" in caught.value.hint


HEADLINE = Finding("B", "operator", side="candidate", checkpoint="layers.1.mlp.up")


def test_only_the_headline_is_accused_and_only_of_path_b() -> None:
    assert accusation_in([HEADLINE]) == Accusation("candidate", "layers.1.mlp.up")
    assert accusation_in([replace(HEADLINE, kind="weights")]) == Accusation("candidate", "layers.1.mlp.up")
    slots = Finding("A", "slots", side="candidate", checkpoint="layers.0.attn.kv_start_indices")
    for findings in (
        [], [slots, HEADLINE], [replace(HEADLINE, side=None)], [replace(HEADLINE, checkpoint=None)],
        [replace(HEADLINE, kind="unexplained")], [replace(HEADLINE, path="C", kind="collective")],
    ):  # fmt: skip
        assert accusation_in(findings) is None


def accused(*names: str, side: str = "candidate", kind: str = "weights") -> list[Finding]:
    return [Finding("B", kind, side=side, checkpoint=name) for name in names]


@pytest.mark.parametrize(
    ("names", "also"),
    [
        (("layers.1.mlp.gate", "layers.1.mlp.up"), ("layers.1.mlp.up",)),
        (("layers.0.attn.q_rope", "layers.0.attn.k_rope"), ("layers.0.attn.k_rope",)),
        (("layers.1.mlp.gate", "layers.0.mlp.up"), ()),  # another layer
        (("layers.1.mlp.gate", "layers.1.mlp.down"), ()),  # behind it
        (("layers.1.mlp.down", "layers.1.mlp.gate"), ()),  # before it
        (("layers.1.mlp.gate", "layers.1.mlp.down", "layers.1.mlp.up"), ("layers.1.mlp.up",)),
        (("layers.1.mlp.gate", "layers.1.mlp.gate"), ()),
        (("final_norm", "logits"), ()),
    ],
)
def test_what_is_accused_beside_it_goes_along(names: tuple[str, ...], also: tuple[str, ...]) -> None:
    found = accusation_in(accused(*names), ONE)
    assert found == Accusation("candidate", names[0], also=also)


def test_what_another_side_or_kind_is_accused_of_does_not_go_along() -> None:
    others = [
        *accused("layers.1.mlp.up", side="reference"),
        *accused("layers.1.mlp.up", kind="unexplained"),
        *accused("layers.1.mlp.up", kind="configuration"),
    ]
    assert accusation_in([*accused("layers.1.mlp.gate"), *others], ONE) == Accusation("candidate", "layers.1.mlp.gate")


def test_two_outputs_take_the_place_of_two() -> None:
    plan = plan_transplant(ONE, Accusation("candidate", "layers.0.attn.q_rope", also=("layers.0.attn.k_rope",)))
    assert plan.outputs == ("layers.0.attn.q_rope", "layers.0.attn.k_rope")
    assert len(plan.inputs) == 2 and not set(plan.inputs) & set(plan.outputs)
    assert set(plan.names) >= {*plan.inputs, *plan.outputs, *plan.points}
    assert "layers.0.attn.k_rope" in plan.notes[0]
    with pytest.raises(NotPossibleError, match="no inverse"):
        plan_transplant(TWO, Accusation("candidate", "layers.0.mlp.gate", also=("layers.0.mlp.down",)))


@pytest.mark.parametrize(
    ("verdict", "known"), [("beyond", True), ("within", False), ("not observable", None), (None, None)]
)
def test_what_is_known_of_an_accused_operator(verdict: str | None, known: bool | None) -> None:
    added = {} if verdict is None else {"candidate": SimpleNamespace(verdict=verdict)}
    tensors: Any = SimpleNamespace(get=lambda name: SimpleNamespace(added=added))
    accusation = Accusation("candidate", "layers.0.mlp.up")
    assert known_of(accusation, tensors, [HEADLINE]) is known
    assert known_of(accusation, None, []) is None
    weights = replace(HEADLINE, kind="weights", checkpoint="layers.0.mlp.up")
    assert known_of(accusation, tensors, [HEADLINE, weights]) is True, "wrong weights are not seen by the residual"
    assert known_of(replace(accusation, side="reference"), tensors, [weights]) is None
