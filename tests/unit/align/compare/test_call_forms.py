"""Arguments of both sides' calls are matched by what they are, and differences in dtype and shape are marked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from align.compare.calls import beside, canonical, operator_differences, own_shape, reading, with_calls
from align.compare.rows import Recorded
from align.findings import Finding
from align.sentences import text_of
from align.trace.calls import Argument, Call, CallRecords, OperatorCall
from align.trace.format import StepEntry


def tensor(name: str, *shape: int, dtype: str = "bfloat16") -> Argument:
    return Argument(name, "Tensor", dtype, shape, (1,) * len(shape), "npu")


def call(rows: int, *arguments: Argument, operators: tuple[OperatorCall, ...] = (), where: str = "m:f") -> Call:
    return Call(where, "", ("attn.q_rope", "attn.k_rope"), (0, 1), "prefill", 0, rows, arguments, operators)


@pytest.mark.parametrize(
    ("shape", "rows", "form"),
    [
        ((1, 7, 256), 7, ("T", 256)),
        ((7, 4, 64), 7, ("T", 256)),
        ((7,), 7, ("T", 1)),
        ((1, 1, 7, 64), 7, ("T", 64)),
        ((1024, 256), 7, (1024, 256)),
        ((1, 1, 256), 1, ("T", 256)),
        ((1, 256), 1, ("T", 256)),
        ((4, 2), 7, (4, 2)),
    ],
)
def test_the_canonical_shape(shape: tuple[int, ...], rows: int, form: tuple[Any, ...]) -> None:
    assert canonical(tensor("x", *shape), rows) == form


def marks(candidate: Call, reference: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    sides = [{one.argument.name: one.mark for one in side} for side in beside(candidate, reference)]
    return sides[0], sides[1]


def test_names_and_layouts_of_shapes_do_not_matter() -> None:
    candidate = call(7, tensor("query", 7, 4, 64), tensor("key", 1, 7, 2, 64), tensor("cos", 7, 64))
    reference = call(9, tensor("positions", 9, dtype="int64"), tensor("q", 9, 256), tensor("k", 9, 128))
    assert marks(candidate, reference) == (
        {"query": "", "key": "", "cos": "alone"},
        {"positions": "alone", "q": "", "k": ""},
    )


def test_another_dtype_is_marked() -> None:
    found = marks(call(7, tensor("x", 7, 8, dtype="float16")), call(7, tensor("y", 7, 8)))
    assert found == ({"x": "dtype"}, {"y": "dtype"})


def test_another_row_length_is_marked() -> None:
    found = marks(call(7, tensor("x", 7, 8), tensor("w", 3, 3)), call(7, tensor("y", 7, 16), tensor("v", 5, 5)))
    assert found == ({"x": "shape", "w": "alone"}, {"y": "shape", "v": "alone"})


def rope(*arguments: Argument) -> OperatorCall:
    return OperatorCall("npu::npu_rms_norm", (), arguments)


def test_one_device_operator_on_both_sides_is_compared_by_name() -> None:
    eps = Argument("epsilon", "float", value="1e-05")
    lengths = [Argument("actual_seq_lengths", "list", value=text) for text in ("1, 2", "3, 4")]
    candidate = call(7, operators=(rope(tensor("input", 1, 7, 8), eps, lengths[0]),))
    reference = call(9, operators=(rope(tensor("input", 9, 8), lengths[1]),))
    assert [text_of(one) for one in operator_differences(candidate, reference)] == [
        "npu::npu_rms_norm epsilon: candidate 1e-05, reference not given, so its default"
    ]
    other = call(9, operators=(OperatorCall("npu::another", (), ()),))
    assert operator_differences(candidate, other) == []


def test_questions_about_a_format_are_no_difference() -> None:
    """Which tensors are asked about, and in which order, says nothing about what is computed."""
    asked = [OperatorCall("npu::get_npu_format", (), (one,)) for one in (tensor("input", 7, 8), tensor("input", 7))]
    assert operator_differences(call(7, operators=tuple(asked)), call(7, operators=tuple(asked[::-1]))) == []


def test_calls_of_one_operator_are_paired_in_order_or_not_at_all() -> None:
    narrow, wide = rope(tensor("input", 7, 8)), rope(tensor("input", 7, 16))
    assert operator_differences(call(7, operators=(narrow, wide)), call(7, operators=(narrow, wide))) == []
    (one,) = operator_differences(call(7, operators=(narrow, wide)), call(7, operators=(narrow, narrow)))
    assert text_of(one) == "npu::npu_rms_norm input: candidate bfloat16 T×16, reference bfloat16 T×8"
    assert text_of(one, "zh") == "npu::npu_rms_norm 的 input：候选侧 bfloat16 T×16，参考侧 bfloat16 T×8"
    assert operator_differences(call(7, operators=(narrow, wide)), call(7, operators=(narrow,))) == []


@pytest.mark.parametrize(
    ("shape", "rows", "words"),
    [
        ((1, 241, 256), 241, "1×T×256"),
        ((241, 4, 128), 241, "T×4×128"),
        ((241,), 241, "T"),
        ((1024, 256), 7, "1024×256"),
        ((1, 1, 256), 1, "1×T×256"),
        ((1, 256), 1, "T×256"),
        ((), 7, ""),
    ],
)
def test_the_engines_own_shape(shape: tuple[int, ...], rows: int, words: str) -> None:
    assert own_shape(shape, rows) == words


def test_what_to_read_ends_at_the_vendors_operator() -> None:
    at = (
        "dlinfer/vendor/ascend/torch_npu_ops.py:463 rms_norm",
        "dlinfer/ops/llm.py:440 rms_norm",
        "lmdeploy/pytorch/kernels/dlinfer/rms_norm.py:8 rms_norm",
        "lmdeploy/pytorch/backends/dlinfer/norm.py:19 forward",
        "lmdeploy/pytorch/models/qwen3.py:88 forward",
    )
    found = reading(call(7, operators=(OperatorCall("npu::npu_rms_norm", at, ()),)))
    assert [(one["what"], one["place"]) for one in found] == [
        ("Impl class", at[3]), ("kernel wrapper", at[2]), ("vendor operator", at[0]),
    ]  # fmt: skip


class Side:
    """A trace that knows its calls alone."""

    ranks = (0,)

    def __init__(self, *calls: Call) -> None:
        self._calls = calls

    def calls(self, rank: int) -> CallRecords:
        return CallRecords(self._calls)

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        return ()


def test_an_accusation_has_both_calls_in_its_evidence() -> None:
    sides = {
        "candidate": Side(call(7, tensor("q", 7, 8, dtype="float16"))),
        "reference": Side(call(9, tensor("query", 9, 8), Argument("scale", "float", value="0.5"))),
    }
    accused = Finding("B", "operator", side="candidate", checkpoint="layers.1.attn.k_rope", evidence={"ratio": 9.0})
    slots = Finding("A", "slots", checkpoint="layers.1.attn.k_rope")
    first, second = with_calls([accused, slots], cast("dict[str, Recorded]", sides))
    assert second is slots
    assert first.evidence["ratio"] == 9.0
    calls = first.evidence["calls"]
    assert [one["name"] for one in calls["candidate"]["arguments"]] == ["q"]
    assert [one["name"] for one in calls["reference"]["arguments"]] == ["query", "scale"]
    assert first.evidence["call_differences"] == ["dtype: candidate q float16 T×8, reference query bfloat16 T×8"]


def test_without_records_a_finding_stays_as_it_is() -> None:
    accused = Finding("B", "operator", side="candidate", checkpoint="layers.1.attn.k_rope")
    sides = {"candidate": Side(), "reference": object()}
    assert with_calls([accused], cast("dict[str, Recorded]", sides)) == [accused]
