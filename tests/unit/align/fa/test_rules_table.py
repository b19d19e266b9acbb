"""The rules as a table, and for each of them a call of which it says something and one of which it does not."""

from __future__ import annotations

import csv
import string

import pytest

from align.fa import SEVERITIES, Call, call_record, check_call, read_call, rules
from align.fa.conditions.version import only
from align.fa.examples import bases, examples
from align.fa.operators import operators, resolve
from align.fa.rules import FAMILIES, Rule, rule
from envs.home import REPOSITORY

BY_ID = {one.id: one for one in rules()}
#: Of these a passing call need not be right otherwise: they say what else there is.
SAYING = ("OK", "INFO")


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_there_are_enough_and_each_has_one_home() -> None:
    assert len(rules()) >= 60
    assert len(BY_ID) == len(rules())
    assert {one.severity for one in rules()} == set(SEVERITIES)
    assert {one.family for one in rules()} == set(FAMILIES)


@pytest.mark.parametrize("one", rules(), ids=lambda one: one.id)
def test_a_row_is_whole(one: Rule) -> None:
    assert one.id.startswith(f"fa.{one.family}.") and rule(one.id) is one
    assert one.severity in SEVERITIES
    assert one.source and one.en and one.zh
    assert places(one.en) - {"inner", "layout", "window", "before"} == places(one.zh) - {
        "inner",
        "layout",
        "window",
        "before",
    }
    assert one.covered, "a rule about no operator"


def test_every_row_of_the_seeds_about_arguments_is_a_source() -> None:
    """Rows about the form of the output, about the article itself and about other checks are not rules."""
    with (REPOSITORY / "tests" / "seed_rows.tsv").open(encoding="utf-8", newline="") as lines:
        known = {row["id"] for row in csv.DictReader(lines, delimiter="\t")}
    sources = " ".join(one.source for one in rules()).replace("000-F2-01..05", _span("000-F2-", 1, 5))
    sources = sources.replace("000-F3-01..03", _span("000-F3-", 1, 3)).replace("000-F3-01..04", _span("000-F3-", 1, 4))
    sources = sources.replace("001-F5-01..04", _span("001-F5-", 1, 4))
    sources = sources.replace("000-F5-0..3", "000-F5-0 000-F5-1 000-F5-2 000-F5-3")
    named = set(
        sources.replace(",", " ").replace(";", " ").replace(":", " ").replace(")", " ").replace("(", " ").split()
    )
    said = {f"000-F{table}" for table in range(1, 7)} | {"001-F1", "001-F2", "001-F3", "001-F4", "001-F5", "001-F6"}
    wanted = {row for row in known if row.rpartition("-")[0] in said or row.startswith("000-Q")}
    output = {"001-F1-13", "001-F3-09"}  # what is printed
    other = {"000-Q05", "000-Q08", "000-Q17"}  # of two calls, and of the cache
    assert wanted - named - output - other == set()
    assert {one for one in named if one[:4] in ("000-", "001-")} <= known


def _span(start: str, first: int, last: int) -> str:
    return " ".join(f"{start}{number:02}" for number in range(first, last + 1))


def test_every_rule_has_an_example() -> None:
    assert set(examples()) == set(BY_ID)


@pytest.mark.parametrize("name", BY_ID)
def test_a_rule_says_something_of_its_failing_call(name: str) -> None:
    report = check_call(examples()[name].fails)
    found = [one for one in report.findings if one.rule == name]
    assert [one.severity for one in found] == [BY_ID[name].severity]
    assert all("{" not in text for text in found[0].said.values())


@pytest.mark.parametrize("name", BY_ID)
def test_a_rule_holds_for_its_passing_call(name: str) -> None:
    report = check_call(examples()[name].passes)
    assert name not in {one.rule for one in report.findings}
    if BY_ID[name].severity != "OK":  # which is silent where it is not right
        assert name in report.held
    if BY_ID[name].severity not in SAYING:
        assert report.ok, report.text()


@pytest.mark.parametrize("name", bases())
def test_the_calls_that_examples_begin_with_are_right(name: str) -> None:
    report = check_call(bases()[name])
    assert report.of("ERROR", "WARN", "REMIND") == (), report.text()
    assert report.held


@pytest.mark.parametrize("name", BY_ID)
def test_what_a_rule_needs_and_does_not_know_is_not_observable(name: str) -> None:
    """A tensor without values and a mask without content never pass a rule that looks at them."""
    call = examples()[name].fails
    record = call_record(call)
    for argument in record["arguments"].values():
        if isinstance(argument, dict):
            for lost in ("values", "mask", "memory", "low", "high"):
                argument["tensor"].pop(lost, None)
    blind = read_call(record)
    report = check_call(blind)
    if blind == call:
        return  # it has no such thing
    fires = name in {one.rule for one in report.findings}
    assert fires or name in report.unknown or name not in report.held


def test_versions_differ_in_the_seeds_names_and_more() -> None:
    v1 = "actual_seq_lengths scale num_heads antiquant_scale antiquant_offset antiquant_mode quant_scale1 quant_scale2 "
    v1 += "quant_offset2 dequant_scale1 dequant_scale2 softmax_lse_flag"
    v2 = "actual_seq_qlen actual_seq_kvlen softmax_scale num_query_heads dequant_scale_key dequant_scale_value "
    v2 += "dequant_offset_key dequant_offset_value key_quant_mode value_quant_mode quant_scale_out quant_offset_out "
    v2 += "return_softmax_lse learnable_sink dequant_scale_query"
    assert only("v1") >= set(v1.split()) | {"actual_seq_lengths_kv"}
    assert only("v2") >= set(v2.split())
    assert not only("v1") & only("v2")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("torch_npu.npu_fused_infer_attention_score", "npu_fused_infer_attention_score"),
        ("torch.ops.npu.npu_fused_infer_attention_score_v2.default", "npu_fused_infer_attention_score_v2"),
        ("npu::npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score"),
        ("torch.ops.atb._npu_paged_attention_mla", "_npu_paged_attention_mla"),
        ("atb::_npu_flash_attention", "_npu_flash_attention"),
    ],
)
def test_an_operator_is_known_in_every_spelling(spelling: str, name: str) -> None:
    assert resolve(spelling).name == name


def test_an_operator_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"npu_rms_norm.*there are"):
        check_call(Call("torch_npu.npu_rms_norm", {}))


def test_roles_name_arguments_that_there_are() -> None:
    for operator in operators().values():
        assert set(operator.roles.values()) <= set(operator.arguments), operator.name
