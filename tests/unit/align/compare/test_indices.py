"""What wrong cache indices explain and what they do not, and where their findings stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from align.compare.added import Added, AddedPart
from align.compare.indices import explains
from align.compare.locate import locate
from align.compare.residual import ResidualVerdict
from align.compare.rows import RowKey
from align.findings import Finding
from tests.unit.align.compare.test_locate import BEYOND, beyond_from, comparison, weight

OUT, NORM = "layers.{}.attn.out", "layers.{}.mlp_norm"


def fault(layer: int = 0, side: str = "candidate", elsewhere: bool = False, **harmed: tuple[int, int]) -> Finding:
    """A finding of the ledger; request → layer and position from which on its attention is wrong."""
    reach = {name: {"layer": at, "position": position} for name, (at, position) in harmed.items()}
    evidence: dict[str, Any] = {"what": "w", "fault": "wrong_slot", "elsewhere": elsewhere, "harmed": reach}
    name = f"layers.{layer}.attn.kv_start_indices"
    return Finding("A", "slots", side=side, checkpoint=name, layer=layer, evidence=evidence)


def wrong(worst: tuple[str, int] | None, *requests: str, rows: int = 3) -> Added:
    """Attention whose rows of these requests are beyond."""
    verdict = ResidualVerdict(
        "x", "attention", "beyond", "far off", 9, 50.0, 4.0, row_name=worst, requests=requests, rows_beyond=rows
    )
    return Added("x", "beyond", "far off", (AddedPart("decode", 0, verdict),))


def found(ledger: list[Finding], added: dict[str, dict[str, Added]], **more: Any) -> list[tuple[str, str | None]]:
    first = next(iter(added), "layers.3.mlp_norm")
    located = locate(comparison(beyond_from(first), added, **more), {}, True, ledger)
    return [(finding.path, finding.checkpoint) for finding in located]


SLOTS = ("A", "layers.0.attn.kv_start_indices")


def test_attention_that_reads_a_wrong_cache_is_not_at_fault() -> None:
    added = {OUT.format(layer): {"candidate": wrong(("r1", 7), "r1")} for layer in range(4)}
    assert found([fault(r1=(0, 7))], added) == [SLOTS]


@pytest.mark.parametrize(
    "added",
    [
        wrong(("r0", 9), "r0"),  # a request that no index harmed
        wrong(("r1", 9), "r1", "r0"),  # this one as well
        wrong(("r1", 3), "r1"),  # before it was harmed
        wrong(None, rows=0),  # channels alone
    ],
)
def test_attention_that_no_index_harmed_is_named(added: Added) -> None:
    assert found([fault(r1=(0, 7))], {OUT.format(1): {"candidate": added}}) == [SLOTS, ("B", OUT.format(1))]


def test_the_other_side_and_earlier_layers_are_named() -> None:
    assert found([fault(r1=(0, 7))], {OUT.format(1): {"reference": wrong(("r1", 7), "r1")}})[1:] == [
        ("B", OUT.format(1))
    ]
    added = {OUT.format(1): {"candidate": wrong(("r1", 7), "r1")}}
    assert found([fault(2, r1=(2, 7))], added) == [
        ("B", OUT.format(1)),
        ("A", "layers.2.attn.kv_start_indices"),
    ]


def test_another_operator_is_named_whatever_the_indices_are() -> None:
    added = {NORM.format(1): {"candidate": BEYOND}, OUT.format(1): {"candidate": wrong(("r1", 7), "r1")}}
    assert found([fault(r1=(0, 7))], added) == [SLOTS, ("B", NORM.format(1))]


def test_an_operator_before_the_first_wrong_index_stays_the_headline() -> None:
    ledger, added = [fault(2, r1=(2, 7))], {NORM.format(0): {"candidate": BEYOND}}
    assert found(ledger, added)[0] == ("B", NORM.format(0))


def test_weights_of_a_later_layer_come_behind_and_those_of_an_earlier_one_before() -> None:
    for layer, order in ((0, ["B", "A"]), (2, ["A", "B"])):
        ledger, audit = [fault(1, r1=(1, 7))], {"candidate": [weight("mlp.up", layer)]}
        assert [one.path for one in locate(None, audit, False, ledger)] == order


@pytest.mark.parametrize("ledger", [fault(), fault(elsewhere=True)])
def test_what_harmed_nothing_stays_and_hides_nothing(ledger: Finding) -> None:
    assert not explains(ledger)
    added = {OUT.format(0): {"candidate": wrong(("r1", 7), "r1")}}
    assert found([ledger], added) == [("B", OUT.format(0)), SLOTS]
    located = locate(comparison(beyond_from("layers.1.mlp.down")), {}, True, [ledger])
    assert [(one.path, one.kind) for one in located] == [("B", "unexplained"), ("A", "slots")]
    assert [one.path for one in locate(comparison({}), {}, True, [ledger])] == ["UNLOCATED", "A"]
    assert [one.path for one in locate(comparison({}), {}, False, [ledger])] == ["A"]


def test_differences_behind_a_harmful_index_are_explained() -> None:
    assert found([fault(r1=(0, 7))], {}) == [SLOTS]


def test_a_value_fault_is_never_path_a() -> None:
    """Attention that is wrong, the more so the longer the history, with right indices."""
    added = {OUT.format(0): {"candidate": wrong(("r2", 30), "r0", "r1", "r2")}}
    assert found([], added) == [("B", OUT.format(0))]


# ------------------------------------------------------------------------------------------ the recorded slots


def slots(side: str = "candidate") -> dict[str, Any]:
    return {"slots": {"layers.0.attn.kv_start_indices": {side: (RowKey("r1", 7, 0),)}}}


def test_the_ledger_stands_for_the_recorded_slots_of_its_side() -> None:
    located = locate(comparison({}, **slots()), {}, False, [fault(r1=(0, 7))])
    assert [one.evidence.get("fault") for one in located] == ["wrong_slot"]


@pytest.mark.parametrize("ledger", [[], [fault(side="reference", r1=(0, 7))], [fault(elsewhere=True)]])
def test_without_it_they_still_tell(ledger: list[Finding]) -> None:
    located = locate(comparison({}, **slots()), {}, False, ledger)
    assert [one.side for one in located if "rows_total" in one.evidence] == ["candidate"]


def test_recorded_slots_explain_all_attention_of_their_side() -> None:
    added = {OUT.format(1): {"candidate": wrong(("r0", 3), "r0")}}
    located = locate(comparison(beyond_from(OUT.format(1)), added, **slots()), {}, True)
    assert [one.path for one in located] == ["A"]


def test_rows_without_names_are_explained_by_any_harm() -> None:
    added = wrong(None, rows=4)
    part = replace(added.parts[0], residual=replace(added.parts[0].residual, requests=()))
    assert found([fault(r1=(0, 7))], {OUT.format(0): {"candidate": replace(added, parts=(part,))}}) == [SLOTS]
