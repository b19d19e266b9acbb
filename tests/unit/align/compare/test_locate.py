"""Origins are named, receivers never."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from align.checkpoints.table import parse, structure_of
from align.compare.added import Added, AddedPart
from align.compare.checkpoint import CheckpointComparison, Verdict
from align.compare.histories import InputDifference
from align.compare.locate import locate
from align.compare.pairing import Pairing
from align.compare.policy import TensorPolicy
from align.compare.residual import ResidualVerdict
from align.compare.rows import PairedRow, Place, RowKey
from align.compare.tensors import TensorComparison
from align.sentences import text_of
from align.trace.format import POSITIONS, TOKEN_IDS
from tests.unit.align.compare import traces

STRUCTURE = structure_of({**traces.CONFIG, "num_hidden_layers": 4})
NAMES = [str(name) for name in STRUCTURE.names()]
PLACE = Place(3, 0, 0)


def comparison(
    verdicts: Mapping[str, Verdict],
    added: Mapping[str, Mapping[str, Added]] | None = None,
    slots: Mapping[str, Mapping[str, tuple[RowKey, ...]]] | None = None,
    inputs: tuple[InputDifference, ...] = (),
) -> TensorComparison:
    """Of a whole model; what is not named is ``within``."""
    found = []
    for name in NAMES:
        parsed = parse(name)
        found.append(
            CheckpointComparison(
                name,
                verdicts.get(name, "within"),
                "because",
                layer=parsed.layer,
                kind=parsed.kind.name,
                worst=PairedRow(RowKey("r1", 9, 0), "decode", PLACE, PLACE),
                rows=20,
                added=(added or {}).get(name, {}),
                wrong_slots=(slots or {}).get(name, {}),
                inputs=tuple((str(one), verdicts.get(str(one), "within")) for one in STRUCTURE.inputs(parsed)),
            )
        )
    return TensorComparison(TensorPolicy.derived("bfloat16", 4), tuple(found), {}, Pairing(inputs=inputs))


def beyond_from(first: str) -> dict[str, Verdict]:
    """A fault at ``first`` that everything behind it in the residual stream receives."""
    names = {first}
    for name in NAMES:
        if any(str(one) in names for one in STRUCTURE.inputs(parse(name))):
            names.add(name)
    return dict.fromkeys(names, "beyond")


def operator(*parts: tuple[str, int, str], name: str = "x") -> Added:
    judged = tuple(
        AddedPart(phase, rank, ResidualVerdict(name, "rms_norm", verdict, "too large", 5, 9.0, 4.0, row_name=("r1", 4)))  # type: ignore[arg-type]
        for phase, rank, verdict in parts
    )
    worst: Any = "beyond" if any(verdict == "beyond" for *_, verdict in parts) else "within"
    return Added(name, worst, "too large" if worst == "beyond" else "", judged)


BEYOND = operator(("prefill", 0, "beyond"), ("decode", 0, "beyond"))


def weight(kind: str, layer: int | None, **changes: Any) -> dict[str, Any]:
    record = {
        "parameter": f"model.layers.{layer}.{kind}.weight", "status": "differs", "kind": kind, "layer": layer,
        "live": f"model.layers.{layer}.fused.weight[{kind}]", "rank": 0, "rows": [7], "rows_total": 1, "max_abs": 0.5,
    }  # fmt: skip
    return {**record, **changes}


def test_nothing_wrong_is_nothing_found() -> None:
    audit = {"candidate": [weight("mlp.down", 1, status="equal"), weight("mlp.up", 1, status="not observable")]}
    clean = comparison({})
    assert locate(clean, audit, tokens_differ=False) == []
    assert clean.first_divergence is None
    assert locate(None, {}, tokens_differ=False) == []


@pytest.mark.parametrize("name", ["embed", "layers.0.attn.v", "layers.1.mlp.gate", "layers.3.attn.o", "logits"])
def test_the_origin_and_no_receiver(name: str) -> None:
    found = comparison(beyond_from(name))
    (finding,) = locate(found, {}, tokens_differ=True)
    assert (finding.path, finding.kind, finding.side, finding.checkpoint) == ("B", "unexplained", None, name)
    assert finding.evidence["inputs_state"] == ("equal" if name == "embed" else "within")
    assert (finding.phase, finding.step, finding.requests, finding.positions) == ("decode", 3, ("r1",), (9,))
    assert "others" not in finding.evidence
    first = found.first_divergence
    assert first is not None and first.name == name


def test_several_origins_are_one_finding() -> None:
    verdicts = {**beyond_from("layers.1.mlp.gate"), **beyond_from("layers.1.mlp.up")}
    (finding,) = locate(comparison(verdicts), {}, tokens_differ=False)
    assert finding.checkpoint == "layers.1.mlp.gate" and finding.evidence["others"] == ["layers.1.mlp.up"]


def test_a_receiver_behind_what_was_not_observed() -> None:
    verdicts = beyond_from("layers.1.mlp.gate")
    verdicts["layers.1.mlp.down"] = verdicts["layers.2.block_in"] = "not observable"
    (finding,) = locate(comparison(verdicts), {}, tokens_differ=False)
    assert finding.checkpoint == "layers.1.mlp.gate" and "others" not in finding.evidence


def test_a_producer_that_was_not_tapped_is_said() -> None:
    verdicts = beyond_from("layers.1.mlp.gate")
    verdicts["layers.1.mlp.gate"] = "not observable"
    (finding,) = locate(comparison(verdicts), {}, tokens_differ=False)
    assert finding.checkpoint == "layers.1.mlp.act" and finding.evidence["inputs_state"] == "unknown"
    assert "one hop later" in finding.summary


def test_a_residual_names_side_and_explains_what_follows() -> None:
    added = {"layers.2.attn_norm": {"reference": BEYOND}}
    findings = locate(comparison(beyond_from("layers.2.attn_norm"), added), {}, tokens_differ=True)
    (finding,) = findings
    assert (finding.path, finding.kind, finding.side) == ("B", "operator", "reference")
    assert (finding.checkpoint, finding.layer, finding.phase) == ("layers.2.attn_norm", 2, None)
    assert (finding.requests, finding.positions, finding.ranks) == (("r1",), (4,), (0,))
    assert finding.evidence["operator"] == "rms_norm"


def test_a_residual_does_not_explain_what_is_before_it() -> None:
    added = {"layers.2.attn_norm": {"candidate": BEYOND}}
    findings = locate(comparison(beyond_from("layers.0.attn.v"), added), {}, tokens_differ=True)
    assert [(one.kind, one.checkpoint) for one in findings] == [
        ("operator", "layers.2.attn_norm"),
        ("unexplained", "layers.0.attn.v"),
    ]


def test_one_kind_over_layers_is_one_finding_and_phases_and_ranks_are_told() -> None:
    decode = operator(
        ("prefill", 0, "within"), ("decode", 0, "within"), ("prefill", 1, "within"), ("decode", 1, "beyond")
    )
    added: dict[str, dict[str, Added]] = {f"layers.{layer}.mlp_norm": {"candidate": decode} for layer in (1, 2, 3)}
    added["layers.3.attn.q"] = {"candidate": BEYOND}
    first, second = locate(comparison({}, added), {}, tokens_differ=False)
    assert (first.checkpoint, first.phase, first.ranks) == ("layers.1.mlp_norm", "decode", (1,))
    assert first.evidence["layers"] == [1, 2, 3]
    assert first.evidence["others"] == ["layers.2.mlp_norm", "layers.3.mlp_norm"]
    assert second.checkpoint == "layers.3.attn.q"


def test_weights_come_before_operators_and_name_parameter_and_row() -> None:
    records = [weight("mlp.down", 3), weight("mlp.down", 1, rank=0, rows=[12]), weight("mlp.down", 1, rank=1, rows=[3])]
    added = {"layers.0.attn_norm": {"candidate": BEYOND}}
    first, second = locate(comparison({}, added), {"reference": records}, tokens_differ=False)
    assert (first.path, first.kind, first.side, first.checkpoint) == ("B", "weights", "reference", "layers.1.mlp.down")
    assert first.ranks == (0, 1) and first.evidence["rows"] == [3, 12]
    assert first.evidence["parameter"] == "model.layers.1.mlp.down.weight"
    assert "fused.weight[mlp.down]" in first.summary
    assert first.evidence["others"] == ["model.layers.3.mlp.down.weight"]
    assert second.kind == "operator"


def test_weights_explain_the_divergence_behind_them() -> None:
    found = locate(comparison(beyond_from("layers.1.mlp.up")), {"candidate": [weight("mlp.up", 1)]}, tokens_differ=True)
    assert [one.kind for one in found] == ["weights"]


def test_weights_alone_without_tensors() -> None:
    (finding,) = locate(None, {"candidate": [weight("embed", None)]}, tokens_differ=True)
    assert finding.checkpoint == "embed" and finding.layer is None


def test_slots_are_path_a_and_explain_the_attention_that_reads_them() -> None:
    slot = "layers.1.attn.kv_start_indices"
    keys = (RowKey("r0", 4, 0), RowKey("r0", 5, 0))
    added = {"layers.1.attn.out": {"candidate": BEYOND}, "layers.0.attn.out": {"reference": BEYOND}}
    verdicts: dict[str, Verdict] = {**beyond_from("layers.1.attn.out"), slot: "beyond"}
    findings = locate(comparison(verdicts, added, {slot: {"candidate": keys}}), {}, tokens_differ=True)
    assert [(one.path, one.kind, one.side, one.checkpoint) for one in findings] == [
        ("B", "operator", "reference", "layers.0.attn.out"),
        ("A", "slots", "candidate", slot),
    ]
    assert findings[1].requests == ("r0",) and findings[1].positions == (4, 5)


def difference(key: str, side: str | None) -> InputDifference:
    return InputDifference(key, "r0", 2, 5, 6, side, 5 if side else None)


def test_inputs_come_first() -> None:
    added = {"layers.0.attn_norm": {"candidate": BEYOND}}
    findings = locate(comparison({}, added, inputs=(difference(TOKEN_IDS, "reference"),)), {}, tokens_differ=True)
    assert [(one.path, one.kind, one.side) for one in findings] == [
        ("INPUT", TOKEN_IDS, "reference"),
        ("B", "operator", "candidate"),
    ]
    assert findings[0].requests == ("r0",) and findings[0].positions == (2,)


def test_wrong_positions_explain_every_difference() -> None:
    found = comparison(beyond_from("layers.0.attn.q_rope"), inputs=(difference(POSITIONS, "candidate"),))
    assert [one.path for one in locate(found, {}, tokens_differ=True)] == ["INPUT"]


def test_tokens_that_nothing_explains_are_unlocated() -> None:
    for found in (comparison({}), None):
        (finding,) = locate(found, {}, tokens_differ=True)
        assert (finding.path, finding.checkpoint) == ("UNLOCATED", None)


def test_names_that_are_not_in_the_table() -> None:
    found = comparison({})
    stranger = CheckpointComparison("layer0_odd_output", "beyond", "because", kind="layer0_odd_output")
    (finding,) = locate(replace(found, checkpoints=(stranger,)), {}, tokens_differ=False)
    assert finding.checkpoint is None and finding.evidence["name"] == "layer0_odd_output"
    assert finding.evidence["inputs_state"] == "unknown"


def test_the_evidence_is_kept_as_data_beside_its_words() -> None:
    """Of every kind of finding; the Chinese report reads it from there."""
    slots = {"layers.0.attn.kv_start_indices": {"candidate": (RowKey("r0", 2, 0), RowKey("r1", 3, 0))}}
    added = {"layers.2.mlp_norm": {"candidate": BEYOND}}
    inputs = (difference(TOKEN_IDS, "candidate"),)
    found = locate(comparison({}, added, slots, inputs), {"reference": [weight("mlp.down", 1)]}, tokens_differ=True)
    found += locate(comparison(beyond_from("layers.1.mlp.up")), {}, tokens_differ=True) + locate(None, {}, True)
    assert {one.kind for one in found} == {TOKEN_IDS, "weights", "slots", "operator", "unexplained", "tokens"}
    for one in found:
        assert text_of(one.evidence["sentence"]) == one.evidence["what"]
        assert re.search("[\u4e00-\u9fff]", text_of(one.evidence["sentence"], "zh")), one.kind


def test_an_operator_says_where_it_was_looked_for_and_where_it_shows() -> None:
    parts = [("prefill", 0, "within"), ("decode", 0, "beyond"), ("prefill", 1, "within"), ("decode", 1, "within")]
    wrong = operator(*parts)
    shows = replace(wrong.parts[1].residual, requests=("r1", "r3"), rows_beyond=4)
    wrong = replace(wrong, parts=(wrong.parts[0], replace(wrong.parts[1], residual=shows), *wrong.parts[2:]))
    (found,) = locate(comparison({}, {"layers.1.mlp_norm": {"candidate": wrong}}), {}, tokens_differ=False)
    assert found.evidence["scope"] == {
        "phases": ["decode"], "phases_of": ["prefill", "decode"], "ranks": [0], "ranks_of": [0, 1],
        "requests": ["r1", "r3"], "rows": 4, "rows_of": 20,
    }  # fmt: skip
    assert (found.requests, found.positions) == (("r1",), (4,)), "the worst place"
