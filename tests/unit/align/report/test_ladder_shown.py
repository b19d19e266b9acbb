"""What the report and the terminal say of a ladder, in both languages, and what a result keeps of it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from align.ladder.planner import ladder_to, next_move
from align.ladder.types import Conclusion, Headline, Ladder, Ran, SelfRan
from align.layout import Layout
from align.report import ladder as shown
from align.report.document import render
from align.result.climbed import with_ladder
from align.result.schema import Result, without_times
from align.sentences import said
from tests.unit.align.result import made

BROKEN = Headline("C", "collective", "candidate", "layers.1.mlp.down", "the reduce is wrong by 5 %.")
TARGET = Layout(2, 2)


def walked(finished: bool = True) -> Ladder:
    ran = {
        Layout(): Ran(Layout(), "aligned", directory="ladder/tp1_dp1_ep1", seconds=31.0),
        Layout(2): Ran(Layout(2), "diverged", BROKEN, directory="ladder/tp2_dp1_ep1", seconds=62.0),
        TARGET: Ran(TARGET, "not comparable", why="the candidate ended\nin the second line", seconds=9.0),
    }
    planned = ladder_to(TARGET)
    found = next_move(planned, ran)
    assert isinstance(found, Conclusion)
    own = SelfRan("candidate", "lmdeploy", Ran(Layout(2), "diverged", BROKEN, directory="ladder/own"), Layout())
    notes = (said("ladder.min_tp_given", tp=1),)
    return Ladder(TARGET, planned, tuple(ran.values()), (own,), found if finished else None, notes)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    found = made.Run(tmp_path, monkeypatch, made.wrong_up).go().result()
    assert found.findings[0].path == "B"
    return found


def test_a_result_keeps_the_ladder_and_its_first_finding_says_the_dimension(result: Result) -> None:
    found = with_ladder(result, walked())
    assert found.ladder is not None and found.ladder.conclusion is not None
    assert found.ladder.conclusion.dimension == "tp"
    assert found.findings[0].summary.endswith("; introduced by TP: tp1 dp1 ep1 is aligned, tp2 dp1 ep1 diverges.")
    assert found.findings[0].summary.startswith(result.findings[0].summary.rstrip("."))
    assert found.findings[0].evidence["ladder"]["dimension"] == "tp"
    again = with_ladder(found, walked())
    assert again.findings[0].summary == found.findings[0].summary, "said once"
    assert Result.model_validate_json(found.model_dump_json()) == found
    assert found.timing.rungs == {"ladder/tp1_dp1_ep1": 31.0, "ladder/tp2_dp1_ep1": 62.0}
    assert "31.0" not in str(without_times(found))


@pytest.mark.parametrize(
    ("lang", "words"),
    [
        (
            "en",
            [
                "## Ladder of layouts",
                "| tp2 dp1 ep1 | diverged | path C: collective of the candidate at layers.1.mlp.down | ladder/tp2",
                "Conclusion: introduced by TP: tp1 dp1 ep1 is aligned, tp2 dp1 ep1 diverges.",
                "its parallelism is wrong",
                "dlinfer/framework/lmdeploy\\_ext/device/",
                "Layouts: introduced by TP",
            ],
        ),
        ("zh", ["## 布局阶梯", "结论：由 TP 引入：tp1 dp1 ep1 一致", "其并行有误", "布局：由 TP 引入", "不一致"]),
    ],
)
def test_the_report(result: Result, lang: str, words: list[str]) -> None:
    text = render(with_ladder(result, walked()), lang)
    for word in words:
        assert word.replace("\\_", "_") in text.replace("\\_", "_"), word


def test_a_walk_that_was_broken_off_says_how_it_goes_on(result: Result) -> None:
    found = with_ladder(result, walked(finished=False))
    assert found.findings[0].summary == result.findings[0].summary
    assert "`align resume` goes on with it" in render(found, "en")


def test_the_terminal_has_one_line_a_rung() -> None:
    out = StringIO()
    shown.show_ladder(Console(file=out, width=300), walked())
    assert out.getvalue().strip().splitlines() == [
        "ladder: tp1 dp1 ep1  aligned  (ladder/tp1_dp1_ep1)",
        "ladder: tp2 dp1 ep1  diverged: path C, collective of the candidate at layers.1.mlp.down  (ladder/tp2_dp1_ep1)",
        "ladder: tp2 dp2 ep1  not comparable: the candidate ended  (this run)",
        "ladder: lmdeploy at tp2 dp1 ep1 does not compute what it computes at tp1 dp1 ep1: its parallelism is wrong",
        "ladder: introduced by TP: tp1 dp1 ep1 is aligned, tp2 dp1 ep1 diverges",
    ]


def test_what_was_not_run_is_there_too(result: Result) -> None:
    whole = walked()
    short = Ladder(TARGET, whole.planned, whole.ran[:2], (), whole.conclusion)
    assert "not run" in render(with_ladder(result, short), "en")
    out = StringIO()
    shown.show_ladder(Console(file=out, width=300), short)
    assert "tp2 dp2 ep1  not run: a simpler one diverges" in out.getvalue()
