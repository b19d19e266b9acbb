"""Each of the 35 items: a run where it is ok, one where it fails, and one that does not show it.

Runs are made by hand, so what each must come to is known without the code that is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from align.checklists.fa import FaCalls, FaFacts
from align.checklists.table import items
from align.result.schema import Result
from align.sentences import text_of
from tests.unit.align.checklists import handmade as made
from tests.unit.align.checklists.handmade import came, finding, result


@dataclass(frozen=True)
class Cases:
    """Runs of one item, and what comes of each.

    Attributes:
        ok: and ``count``, on how many it was evaluated.
        failed: and ``findings``, the numbers of those that it rests on; ``None`` where nothing can fail it.
        hidden: not observable.
        fa_ok, fa_failed: attention's calls, where these decide.
    """

    ok: Result
    count: int
    failed: Result | None
    findings: tuple[int, ...]
    hidden: Result
    fa_ok: FaFacts | None = None
    fa_failed: FaFacts | None = None


def by_calls(item: str, **more: Any) -> Cases:
    """An item that the record of attention's calls alone decides."""
    rule = items()[item].rules[0]
    wrong = finding("FA", "argument", evidence={"rule": rule})
    return Cases(
        result(), 16, result(findings=[wrong]), (1,), result(), made.fa(item), made.fa(item, wrong={rule: (1,)}), **more
    )


def of_fault(kind: str, count: int, phases: tuple[str, ...] = ("decode",), **detail: Any) -> Cases:
    """An item that the audit of the cache's indices decides."""
    wrong = result(findings=[finding(), made.fault(kind, phases, **detail)], ledger=made.ledger(1))
    return Cases(result(), count, wrong, (2,), result(ledger=made.ledger(observable=False)))


DIVERGED = [finding()]
UNEXPLAINED = finding("B", "unexplained", evidence={"inputs_state": "equal"})
PARALLEL = made.case("tp2 dp2 ep1")
CASES = {
    "000-Q01": Cases(
        result(), 2, result(conditions=made.conditions(dtype="false")), (),
        result(conditions=made.conditions(dtype="unknown")),
    ),
    "000-Q02": by_calls("000-Q02"),
    "000-Q03": of_fault("index_dtype", 12, name="tables"),
    "000-Q04": by_calls("000-Q04"),
    "000-Q05": by_calls("000-Q05"),
    "000-Q06": by_calls("000-Q06"),
    "000-Q07": by_calls("000-Q07"),
    "000-Q08": of_fault("wrong_length", 4, ("prefill",)),
    "000-Q09": by_calls("000-Q09"),
    "000-Q10": by_calls("000-Q10"),
    "000-Q11": by_calls("000-Q11"),
    "000-Q12": by_calls("000-Q12"),
    "000-Q13": by_calls("000-Q13"),
    "000-Q14": by_calls("000-Q14"),
    "000-Q15": Cases(
        result(facts=made.model(latent_attention=True)), 16,
        result(facts=made.model(latent_attention=True), findings=[finding("FA", "argument")]), (1,),
        result(facts=made.model(latent_attention=True)),
        made.fa("000-Q15"), made.fa("000-Q15", wrong={"fa.mla.pair": (1,)}),
    ),
    "000-Q16": by_calls("000-Q16"),
    "000-Q17": of_fault("layer_length", 20),
    "003-CK-01": Cases(
        result(), 7, result(conditions=made.conditions(greedy="false", warmup="unknown")), (),
        result(conditions=made.conditions(soc="absent")),
    ),
    "003-CK-02": Cases(
        result(findings=DIVERGED, alone=made.alone()), 1, result(findings=DIVERGED), (), made.stopped(),
    ),
    "003-CK-03": Cases(
        result(tokens=made.tokens("diverged"), verdict="diverged"), 8,
        result(conditions=made.conditions(token_ids="false")), (), result(tokens=None),
    ),
    "003-CK-04": Cases(
        result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder("introduced", "dp")), 2,
        result(case=PARALLEL, findings=DIVERGED), (),
        result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder(None)),
    ),
    "003-CK-05": Cases(
        result(findings=DIVERGED), 1, result(findings=[finding("UNLOCATED", "tokens")]), (1,), made.stopped(),
    ),
    "003-CK-06": Cases(
        result(), 10, result(recordings=made.recordings(("a.st cannot be read",))), (),
        result(recordings={}, tensors=None),
    ),
    "003-CK-07": Cases(
        result(), 4, result(findings=DIVERGED, tensors=made.tensors(layers=made.layers(2))), (1,),
        result(tensors=made.tensors(layers=made.layers(2))),
    ),
    "003-CK-08": Cases(
        result(findings=DIVERGED), 1, result(findings=[finding("UNLOCATED", "tokens", checkpoint=None, layer=None)]),
        (1,), made.stopped(),
    ),
    "003-CK-09": Cases(
        result(findings=DIVERGED, tensors=made.tensors(shown=[made.shown("layers.1.mlp.up", "within")])), 9,
        result(findings=DIVERGED, tensors=made.tensors(shown=[made.shown("layers.1.mlp.up", "beyond")])), (1,),
        result(findings=DIVERGED),
    ),
    "003-CK-10": Cases(
        result(paired=made.paired("mended")), 8, result(findings=DIVERGED, paired=made.paired("not mended")), (1,),
        result(findings=DIVERGED),
    ),
    "003-TS-01": Cases(
        result(), 8, result(findings=DIVERGED, symptom=made.symptom("shown")), (1,),
        result(symptom=made.symptom("not observable")),
    ),
    "003-TS-02": Cases(
        result(case=PARALLEL, recordings=made.recordings(dummies=3), ledger=made.ledger(idle_rows=3)), 12,
        result(case=PARALLEL, findings=[made.fault("dummy_write", rows="idle")]), (1,),
        result(case=PARALLEL, ledger={}),
    ),
    "003-TS-03": Cases(
        result(case=PARALLEL), 2, result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder("introduced", "dp")),
        (1,), result(case=PARALLEL, findings=DIVERGED),
    ),
    "003-TS-04": Cases(
        result(), 10, result(recordings=made.recordings(("a.st cannot be read",))), (),
        result(recordings={}, tensors=None),
    ),
    "003-TS-05": Cases(
        result(), 2, result(conditions=made.conditions(warmup="false")), (),
        result(conditions=made.conditions(warmup="unknown")),
    ),
    "003-TS-06": Cases(result(), 16, result(stability=made.stability(False)), (), result(stability=[])),
    "003-TS-07": Cases(
        result(), 2, result(findings=DIVERGED, tensors=made.tensors(layers=made.layers(2))), (1,),
        result(tensors=made.tensors(layers=made.layers(2))),
    ),
    "003-TS-08": Cases(
        result(findings=[UNEXPLAINED], diagnosis=made.diagnosis("candidate")), 12, result(findings=[UNEXPLAINED]), (1,),
        result(tensors=None),
    ),
}  # fmt: skip


def test_every_item_has_cases() -> None:
    assert list(CASES) == list(items())


@pytest.mark.parametrize("item", CASES)
def test_it_is_ok_with_the_number_that_it_was_evaluated_on(item: str) -> None:
    found = came(item, CASES[item].ok, CASES[item].fa_ok)
    assert (found.state, found.count, found.mend, found.mend_told) == ("ok", CASES[item].count, "", None), found.what


@pytest.mark.parametrize("item", CASES)
def test_it_fails_with_the_findings_that_it_rests_on(item: str) -> None:
    failed = CASES[item].failed
    assert failed is not None
    found = came(item, failed, CASES[item].fa_failed)
    assert (found.state, tuple(found.findings)) == ("failed", CASES[item].findings), found.what


@pytest.mark.parametrize("item", CASES)
def test_it_is_not_observable_with_a_reason_and_what_would_show_it(item: str) -> None:
    found = came(item, CASES[item].hidden)
    assert (found.state, found.count) == ("not observable", None), found.what
    assert found.what and found.mend and found.mend_told is not None
    assert found.mend_told["say"] == items()[item].mend


@pytest.mark.parametrize("item", CASES)
def test_nothing_is_ok_where_nothing_was_compared(item: str) -> None:
    assert came(item, made.stopped()).state in ("not observable", "not applicable")


@pytest.mark.parametrize("item", CASES)
def test_evidence_is_readable_in_both_languages(item: str) -> None:
    cases = CASES[item]
    runs = [(cases.ok, cases.fa_ok), (cases.failed, cases.fa_failed), (cases.hidden, None)]
    for run, calls in runs:
        assert run is not None
        found = came(item, run, calls)
        assert text_of(found.told) == found.what
        assert text_of(found.told, "zh")
        assert "{" not in text_of(found.told, "zh") + found.what


def test_calls_without_their_facts_are_not_observable_and_one_phase_is_not_two() -> None:
    rules = frozenset(items()["000-Q11"].rules)
    partly = (FaCalls("candidate", "decode", 3, frozenset(), rules), FaCalls("reference", "decode", 5, rules))
    found = came("000-Q11", result(), FaFacts(partly))
    assert found.state == "not observable" and "3 of 8 calls" in found.what
    rules = frozenset(items()["000-Q05"].rules)
    decode = tuple(FaCalls(side, "decode", 3, rules) for side in made.SIDES)
    found = came("000-Q05", result(), FaFacts(decode))
    assert found.state == "not observable" and "candidate in prefill" in found.what


def test_a_rule_that_no_call_is_about_is_not_applicable_and_a_warning_is_told() -> None:
    other = tuple(FaCalls(side, "decode", 3, frozenset({"fa.other"})) for side in made.SIDES)
    assert came("000-Q14", result(), FaFacts(other)).state == "not applicable"
    found = came("000-Q04", result(), made.fa("000-Q04", warned={"fa.mask.left-up-used": 2}))
    assert found.state == "ok" and "fa.mask.left-up-used on 2 calls" in found.what


def test_an_error_of_the_calls_fails_what_the_audit_finds_right() -> None:
    calls = made.fa("000-Q03", wrong={"fa.paged.table-dtype": (1,)})
    found = came("000-Q03", result(findings=[finding("FA", "argument")]), calls)
    assert (found.state, found.findings) == ("failed", [1])


def test_a_wrong_length_of_decode_is_no_wrong_length_after_prefill() -> None:
    run = result(findings=[made.fault("frozen_length", ("decode",))], ledger=made.ledger(1))
    assert came("000-Q08", run).state == "ok"
    assert came("000-Q10", run).state == "failed"
    calls = made.fa("000-Q08", wrong={"fa.lengths.kv-step": (1,)})
    decode = result(findings=[finding("FA", "argument", phase="decode")])
    assert came("000-Q08", decode, calls).state == "ok"
    prefill = result(findings=[finding("FA", "argument", phase="prefill")])
    assert came("000-Q08", prefill, calls).state == "failed"
    zero = made.fa("000-Q08", wrong={"fa.lengths.zero-kv": (1,)})
    assert came("000-Q08", decode, zero).state == "failed"


def test_what_the_layers_say_is_no_proof_of_what_was_handed_over_but_fails_it() -> None:
    assert came("000-Q06", result()).state == "not observable"
    assert "attention_scale" in came("000-Q06", result()).what
    for item, name in (("000-Q06", "attention_scale"), ("000-Q07", "kv_heads")):
        found = came(item, result(conditions=made.conditions(**{name: "false"})), made.fa(item))
        assert found.state == "failed" and name in found.what


def test_a_condition_that_is_told_as_a_finding_names_it() -> None:
    told = finding("FA", "configuration", evidence={"conditions": [{"condition": "attention_scale"}]})
    run = result(findings=[finding(), told], conditions=made.conditions(attention_scale="false", heads="false"))
    assert came("000-Q06", run).findings == [2]
    assert came("000-Q07", run).findings == []


def test_floats_from_the_host_fail_the_device() -> None:
    found = came("000-Q02", result(findings=[finding("B", "host fallback")]), made.fa("000-Q02"))
    assert (found.state, found.findings) == ("failed", [1])


@pytest.mark.parametrize(
    ("item", "run"),
    [
        ("000-Q01", result(facts=made.model(quantised_cache=True))),
        ("000-Q15", result()),
        *((f"003-CK-{number:02}", result()) for number in (2, 5, 8, 9, 10)),
        ("003-CK-04", result(case=made.case("tp2 dp1 ep1"))),
        ("003-CK-08", result(findings=[finding("INPUT", "token_ids", checkpoint=None, layer=None)])),
        ("003-CK-10", result(paired=made.paired("same"))),
        ("003-TS-02", result()),
        ("003-TS-02", result(case=PARALLEL)),
        ("003-TS-03", result(case=made.case("tp2 dp1 ep1"))),
    ],
)
def test_what_is_not_in_the_run_is_not_applicable(item: str, run: Result) -> None:
    assert came(item, run).state == "not applicable"


@pytest.mark.parametrize(
    ("item", "run", "state"),
    [
        ("003-CK-02", result(case=made.case(requests=1), findings=DIVERGED), "ok"),
        ("003-CK-02", result(findings=DIVERGED, alone=made.alone(False)), "ok"),
        ("003-CK-02", result(source="compare", findings=DIVERGED), "not observable"),
        ("003-CK-03", result(conditions=made.conditions(token_ids="unknown")), "not observable"),
        ("003-CK-04", result(), "ok"),
        ("003-CK-05", result(verdict="diverged", tokens=made.tokens("diverged")), "failed"),
        ("003-CK-09", result(findings=[made.fault("wrong_slot")]), "ok"),
        ("003-CK-09", result(findings=DIVERGED, diagnosis=made.diagnosis("candidate")), "ok"),
        ("003-CK-09", result(findings=DIVERGED, diagnosis=made.diagnosis(None, "not observable")), "not observable"),
        ("003-CK-10", result(paired=made.paired("mended", conclusive=False)), "not observable"),
        ("003-CK-10", result(findings=DIVERGED, paired=made.paired("moved")), "failed"),
        ("003-TS-01", result(findings=[made.fault("wrong_slot")], symptom=made.symptom("shown"),
                             ledger=made.ledger(1)), "ok"),
        ("003-TS-03", result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder("introduced", "tp")), "ok"),
        ("003-TS-03", result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder("unclear")), "failed"),
        ("003-TS-03", result(case=PARALLEL, findings=DIVERGED, ladder=made.ladder("unknown")), "not observable"),
        ("003-TS-04", result(recordings=made.recordings(steps=0)), "failed"),
        ("003-TS-05", result(findings=[finding("UNLOCATED", "residue")]), "failed"),
        ("003-TS-05", result(findings=[made.fault("dirty_cache")]), "failed"),
        ("003-TS-05", result(findings=[made.fault("wrong_slot")], stability=made.stability(False)), "failed"),
        ("003-TS-05", result(stability=made.stability(False)), "not observable"),
        ("003-TS-06", result(conditions=made.conditions(greedy="false")), "failed"),
        ("003-TS-08", result(findings=[finding("B", "unexplained", evidence={"inputs_state": "beyond"})]), "ok"),
    ],
)  # fmt: skip
def test_cases_on_the_edge(item: str, run: Result, state: str) -> None:
    found = came(item, run)
    assert found.state == state, found.what
