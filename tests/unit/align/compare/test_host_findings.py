"""Host-computed floats become findings of path B with their call site, whatever the numbers say; the rest is noted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from align.compare.added import Added, AddedPart
from align.compare.host import host_fallbacks
from align.compare.residual import ResidualVerdict
from align.compare.rows import Recorded
from align.compare.tensors import TensorComparison
from align.findings import Finding
from align.sentences import text_of
from align.trace.calls import CallRecords, FloatOperator, HostMove
from align.trace.format import StepEntry
from tests.unit.align.compare.test_locate import comparison

COS = HostMove(
    0, "prefill", True, "aten::cos", ("rotary.py:9 forward",), "aten::to", ("rotary.py:10 forward", "model.py:2 run"),
    (1, 7, 64), "bfloat16", 1, (), "embed", (("layers.0.attn.q_rope", "cos"), ("layers.0.attn.k_rope", "cos")),
)  # fmt: skip
SIN = replace(COS, made_by="aten::sin", moved_at=("rotary.py:11 forward",), feeds=(("layers.0.attn.q_rope", "sin"),))


class Side:
    ranks = (0,)

    def __init__(self, *moves: HostMove, operators: tuple[FloatOperator, ...] = (), warnings: Any = ()) -> None:
        self._records = CallRecords((), operators, moves)
        self.manifest = {"fallback_warnings": list(warnings)}

    def calls(self, rank: int) -> CallRecords:
        return self._records

    def steps(self, rank: int = 0) -> tuple[StepEntry, ...]:
        return ()


def judged(
    candidate: Side, reference: Side | None = None, compared: TensorComparison | None = None
) -> tuple[list[Finding], list[Finding], list[str]]:
    sides = {"candidate": candidate, "reference": reference or Side()}
    return host_fallbacks(compared or comparison({}), cast("dict[str, Recorded]", sides))


def test_cos_and_sin_of_one_function_are_one_finding() -> None:
    decode = [replace(one, phase="decode", step=step) for one in (COS, SIN) for step in (1, 2)]
    affected, (found,), told = judged(Side(COS, SIN, *decode))
    assert (affected, told) == ([], [])
    assert (found.path, found.kind, found.side) == ("B", "host fallback", "candidate")
    assert (found.checkpoint, found.layer, found.phase, found.ranks) == ("layers.0.attn.q_rope", 0, None, (0,))
    evidence = found.evidence
    assert evidence["made"] == ["aten::cos", "aten::sin"]
    assert evidence["moved_at"] == ["rotary.py:10 forward", "rotary.py:11 forward"]
    assert evidence["arguments"] == ["cos", "sin"]
    assert (evidence["count"], evidence["steps"], evidence["seen_in"]) == (6, 3, ["decode", "prefill"])
    assert "rotary.py:10 forward" in found.summary
    assert "which computes it on its device" in evidence["said"]


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (replace(COS, computed=False, made_by="", made_at=()), "were on the host before"),
        (replace(COS, shape=()), "a single float"),
        (replace(COS, shape=(1, 1)), "a single float"),
    ],
)
def test_constants_and_single_elements_are_information(move: HostMove, words: str) -> None:
    affected, others, (told,) = judged(Side(move))
    assert (affected, others) == ([], [])
    assert words in told
    assert "candidate" in told


def test_without_moves_there_is_nothing() -> None:
    assert judged(Side()) == ([], [], [])


def test_other_functions_and_other_checkpoints_are_other_findings() -> None:
    inside = replace(COS, feeds=(), inside=("layers.1.mlp.act",), moved_at=("act.py:3 forward",))
    _, found, _ = judged(Side(COS, inside))
    assert [one.checkpoint for one in found] == ["layers.0.attn.q_rope", "layers.1.mlp.act"]


def test_what_is_near_no_tapped_call_says_where_it_is() -> None:
    _, (found,), _ = judged(Side(replace(COS, feeds=())))
    assert found.checkpoint is None
    assert "behind embed" in found.summary


def added(verdict: Any, rel_l2: float) -> Added:
    name = "layers.0.attn.q_rope"
    residual = ResidualVerdict(name, "rope", verdict, "because", 20, 9.0, 4.0, rel_l2=rel_l2)
    return Added(name, verdict, "because", (AddedPart("prefill", 0, residual),))


def test_numbers_that_are_affected_lead() -> None:
    wrong = {"layers.0.attn.q_rope": {"candidate": added("beyond", 0.02), "reference": added("within", 0.001)}}
    (found,), others, _ = judged(Side(COS), compared=comparison({}, added=wrong))
    assert others == []
    residuals = found.evidence["residuals"]
    assert (residuals["candidate"]["rel_l2"], residuals["reference"]["rel_l2"]) == (0.02, 0.001)
    assert residuals["candidate"]["verdict"] == "beyond"
    assert "the candidate's own error there is 0.02" in found.evidence["said"]


def test_both_on_the_host_measures_nothing() -> None:
    _, found, _ = judged(Side(COS), Side(COS))
    assert [one.side for one in found] == ["candidate", "reference"]
    assert all("not measured against a device" in one.evidence["said"] for one in found)


WARNING = {"operator": "aten::isin.Tensor_Tensor_out", "place": "", "line": "CAUTION", "count": 1}


def test_a_warning_about_an_operator_of_the_steps_is_a_finding() -> None:
    used = FloatOperator("aten::isin", "prefill", 0, ("rotary.py:9 forward",), ("layers.1.attn.q_rope",))
    _, (found,), told = judged(Side(operators=(used,), warnings=[WARNING]))
    assert told == []
    assert found.checkpoint == "layers.1.attn.q_rope"
    assert found.evidence["made"] == ["aten::isin.Tensor_Tensor_out"]
    assert found.evidence["made_at"] == ["rotary.py:9 forward"]


def test_a_warning_about_another_operator_is_information() -> None:
    _, found, (told,) = judged(Side(warnings=[WARNING]))
    assert found == []
    assert "aten::isin.Tensor_Tensor_out" in told


def test_what_is_said_is_kept_as_data() -> None:
    _, found, _ = judged(Side(COS, SIN), Side(COS))
    for one in found:
        assert text_of(one.evidence["sentence"]) == one.evidence["what"]
        assert text_of(one.evidence["numbers"]) == one.evidence["said"]
        assert "浮点数在主机上计算（aten::cos，位于 rotary.py:9 forward" in text_of(one.evidence["sentence"], "zh")
    assert len(found) == 2
