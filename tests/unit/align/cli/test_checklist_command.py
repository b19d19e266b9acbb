"""``align checklist``, and ``align explain`` of an item."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from align.checklists.table import items
from align.cli.leave import text_of
from align.result.schema import Result
from tests.unit.align.checklists import handmade as made

Align = Callable[..., tuple[int, str, str]]


@pytest.fixture
def leave(tmp_path: Path) -> Callable[[Result], Path]:
    def write(found: Result) -> Path:
        (tmp_path / "result.json").write_text(text_of(found), encoding="utf-8")
        return tmp_path

    return write


CLEAN = made.result()
WRONG = made.result(findings=[made.fault("layer_length")], ledger=made.ledger(1), alone=made.alone())


@pytest.mark.parametrize(("found", "code"), [(CLEAN, 0), (WRONG, 1), (made.stopped(), 2)])
def test_the_exit_code_says_whether_an_item_failed(
    align: Align, leave: Callable[[Result], Path], found: Result, code: int
) -> None:
    assert align("checklist", str(leave(found)))[0] == code


def test_it_is_evaluated_anew_from_a_result_that_has_none(align: Align, leave: Callable[[Result], Path]) -> None:
    assert not WRONG.checklists
    code, out, _ = align("checklist", str(leave(WRONG) / "result.json"), "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (1, "diverged")
    assert [one["name"] for one in found["checklists"]] == ["quick", "alignment", "troubleshooting"]
    states = {item["id"]: item["state"] for one in found["checklists"] for item in one["items"]}
    assert len(states) == 35 and states["000-Q17"] == "failed"


def test_the_table_has_what_failed_first_and_says_what_would_show_the_rest(
    align: Align, leave: Callable[[Result], Path]
) -> None:
    out = align("checklist", str(leave(WRONG)))[1]
    quick = out.splitlines()
    assert quick[0].startswith("Quick checklist: attention and cache (seed 000 §2.2): ")
    assert quick[2].split()[:2] == ["000-Q17", "failed"] and "[1]" in quick[2]
    assert "→ a run that records attention's calls" in out
    zh = align("checklist", str(leave(WRONG)), "--lang", "zh")[1]
    assert "失败" in zh and "kv_len 层内只读" in zh


def test_the_items_are_listed_with_their_sources(align: Align) -> None:
    code, out, _ = align("checklist", "--list")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 36
    assert "seed 000 §2.2" in lines[1] and "seed 003, troubleshooting" in lines[-1]
    listed = json.loads(align("checklist", "--list", "--json")[1])["items"]
    assert [one["id"] for one in listed] == list(items())
    assert all(one["observable_by"] and one["source"] and one["zh"] for one in listed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checklist"], "no run is named"),
        (["checklist", "/nowhere"], "does not exist"),
        (["checklist", "--list", "--lang", "fr"], "--lang fr is not known"),
    ],
)
def test_what_it_refuses_says_what_to_do(align: Align, arguments: list[str], words: str) -> None:
    code, _, err = align(*arguments)
    assert code == 2 and words in err and "next: " in err


def test_an_item_is_explained(align: Align) -> None:
    code, out, _ = align("explain", "000-q08")
    assert code == 0
    assert out.startswith("000-Q08: After prefill kv_len is the length of the prompt, and not 0\n")
    assert "decided by: ledger: looked.prefill_lengths" in out and "source: seed 000 §2.2" in out
    assert "判定依据" in align("explain", "003-CK-07", "--lang", "zh")[1]
    assert json.loads(align("explain", "000-Q08", "--json")[1])["named"]["checklist"]["number"] == 8
    assert "closest: 000-Q0" in align("explain", "000-Q99")[2]
    assert align("explain", "003-TS-02")[1].startswith("003-TS-02: Tensors of length 1")
