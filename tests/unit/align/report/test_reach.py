"""Where and when a finding shows: one phase everywhere, the first place to read, scope apart from the worst place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.findings import Finding
from align.report import reach
from align.report.words import words_of
from align.result.parts import Recording
from align.result.schema import Result
from align.result.scope import Scope, WorstPlace
from align.sentences import text_of
from tests.unit.align.result import made


def states(prefill: str, first: str, later: str, onset: str | None) -> dict[str, Any]:
    return {"phases": {"states": {"prefill": prefill, "decode 1": first, "decode N": later}, "onset": onset}}


@pytest.mark.parametrize(
    ("kind", "phase", "evidence", "key"),
    [
        ("operator", None, states("beyond", "beyond", "within", "prefill"), "prefill on"),
        ("operator", "prefill", states("beyond", "within", "within", "prefill"), "prefill alone"),
        ("operator", "decode", states("within", "beyond", "beyond", "decode 1"), "decode 1"),
        ("slots", None, states("equal", "equal", "beyond", "decode N"), "decode N"),
        ("operator", "decode", states("within", "within", "within", None), "decode"),
        ("operator", None, {"scope": {"phases": ["prefill", "decode"]}}, "each"),
        ("operator", None, {"scope": {"phases": ["mixed"]}}, "mixed"),
        ("host fallback", None, {"phases": ["decode", "prefill"]}, "each"),
        ("weights", None, states("within", "within", "within", None), "each"),
        ("tokens", None, {}, "unknown"),
    ],
)
def test_the_phase_of_a_finding(kind: str, phase: str | None, evidence: dict[str, Any], key: str) -> None:
    finding = Finding("B", kind, phase=phase, evidence=evidence)
    assert reach.phase_of(finding) == f"phase.{key}"
    assert words_of("en").has(f"phase.{key}")


def test_a_list_of_phases_has_no_onset() -> None:
    assert reach.onset_of(Finding("B", "host fallback", evidence={"phases": ["decode"]})) is None
    assert (
        reach.onset_of(Finding("B", "operator", evidence=states("equal", "beyond", "beyond", "decode 1"))) == "decode 1"
    )
    assert reach.onset_of(Finding("B", "operator")) is None


def test_where_to_begin_to_read() -> None:
    read = {
        "candidate": [{"what": "Impl class", "place": "a.py:3 f"}, {"what": "x", "place": "b.py:4"}],
        "reference": [],
    }
    assert reach.begin_at(Finding("B", "operator", side="candidate", evidence={"read": read})) == "a.py:3 f"
    assert reach.begin_at(Finding("B", "operator", side="reference", evidence={"read": read})) == ""
    assert reach.begin_at(Finding("B", "unexplained", evidence={"read": read})) == ""
    assert reach.begin_at(Finding("B", "weights", side="candidate")) == ""


def test_scope_is_told_apart_from_the_worst_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result: Result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    scope = Scope(
        origin_layers=[1], layers_of=2, checkpoints_beyond=0, requests=["r1", "r3"], requests_of=["r0", "r1", "r3"],
        ranks=[0], ranks_of=[0, 1], rows=61, rows_of=64,
        worst=WorstPlace(checkpoint="layers.1.x", request="r3", position=9),
    )  # fmt: skip
    told = reach.scope(result.model_copy(update={"scope": scope}))
    lines = [words_of("en")(key, **values) for key, values in told]
    assert "Layers where it begins: layer 1 (of 2 compared)" in lines
    assert "Requests that show it: r1, r3 (of 3 compared)" in lines
    assert "Ranks that show it: rank 0 (of 2)" in lines
    assert "Rows that show it by themselves: 61 of the 64 that were recomputed" in lines
    assert lines[-1].startswith("The row that shows it most: r3 at position 9, layers.1.x.")
    assert lines[-1].endswith("not the scope.")
    every = dict(
        reach.scope(result.model_copy(update={"scope": scope.model_copy(update={"requests_of": ["r1", "r3"]})}))
    )
    assert words_of("en")("scope.requests", **every["scope.requests"]) == "Requests that show it: all 2 requests"
    unknown = dict(reach.scope(result.model_copy(update={"scope": Scope(requests=["r1"])})))
    assert words_of("en")("scope.requests", **unknown["scope.requests"]) == "Requests that show it: r1"
    chinese = [words_of("zh")(key, **values) for key, values in told]
    assert "出错起点：第 1 层（共比较 2 层）" in chinese
    assert "出现问题的请求：r1、r3（共比较 3 个）" in chinese
    assert "出现问题的 rank：rank 0（共 2 个）" in chinese
    assert "scope.rows" not in unknown and "scope.worst" not in unknown


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([], []),
        ([3], ["3"]),
        ([0, 1], ["0", "1"]),
        ([0, 1, 2, 3, 7], ["0–3", "7"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        (["r0", "r1", "r2", "q3"], ["r0–r2", "q3"]),
        ([8, 9, 10, 11], ["8–11"]),
        ([3, 2, 1], ["3", "2", "1"]),
        (["r08", "r09", "r10"], ["r08", "r09", "r10"]),
    ],
)
def test_lists_are_told_in_whole_ranges(found: list[Any], told: list[str]) -> None:
    assert reach.spans(found) == told


def test_a_long_list_of_followers_is_not_cut() -> None:
    assert reach.cut(range(200)) == ["0–199"]
    assert reach.cut(range(0, 20, 2), 3) == ["0", "2", "4", "… (10)"]


def test_the_whole_scope_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result: Result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    scope = Scope(
        origin_layers=[0, 1, 2], layers_of=4, requests=["c", "a", "b"], requests_of=["a", "b", "c"], ranks=[0]
    )
    first = result.findings[0]

    def line(lang: str, **scoped: Any) -> str:
        finding = first.model_copy(
            update={"side": "candidate", "evidence": {"scope": {"steps": list(range(8))}, **scoped}}
        )
        told = reach.whole(result.model_copy(update={"scope": scope, "findings": [finding]}))
        assert told is not None
        return text_of(told, lang)

    assert line("en") == "all 3 requests; steps 0–7; layers 0–2"
    assert line("zh") == "全部 3 个请求；第 0–7 步；第 0–2 层"
    recorded = Recording(ranks=[0], steps=8, dummies=0, damaged=[])
    result = result.model_copy(update={"recordings": {"candidate": recorded}})
    assert line("en") == "all 3 requests; every step; layers 0–2"
    assert line("en", run=3, recorded_run=2) == "all 3 requests; steps 0–7; layers 0–2", "of another run"
    some = scope.model_copy(update={"requests": ["c", "a"]})
    told = reach.whole(result.model_copy(update={"scope": some}))
    assert told is not None and text_of(told).startswith("requests a, c; ")
    assert reach.whole(result.model_copy(update={"findings": []})) is None
