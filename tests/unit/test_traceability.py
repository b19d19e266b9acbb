"""Every row of the seeds is shown by a test, deviated from with a reason, or left to a later issue.

``tests/seed_rows.tsv`` lists the rows (id, seed, section, kind); ``tests/traceability.tsv`` says what became of each:
``test`` (``where`` names tests, separated by ``; ``), ``deviation`` (``note`` gives the reason, ``where`` may name the
tests of what is done instead), or ``later`` (``where`` is the issue).
"""

from __future__ import annotations

import ast
import csv
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from align.knowledge import knowledge
from envs.home import REPOSITORY

TESTS = REPOSITORY / "tests"
STATUSES = ("test", "deviation", "later")
#: Issues that rows may be left to, with their titles. Remove an issue when it is done: its rows must then be shown.
ISSUES = {
    7: "Path C, first half: layouts, the ladder, and every collective (dense, TP and DP)",
    8: "FlashAttention argument checks, and the three checklists",
    9: "Path C, second half: experts",
    10: "Drills: measure the harness itself",
    11: "The page that people forward, and the first nightly",
}
#: How many rows each seed has.
ROWS = {"000": 127, "001": 97, "002": 106, "003": 97}


@dataclass(frozen=True)
class Mapped:
    """One row of ``traceability.tsv``."""

    id: str
    seed: str
    status: str
    where: str
    note: str

    @property
    def tests(self) -> tuple[str, ...]:
        return () if self.status == "later" or not self.where else tuple(self.where.split("; "))


def table(file: str) -> list[dict[str, str]]:
    with (TESTS / file).open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for row in rows:
        assert None not in row and None not in row.values(), f"{file}: a line of another length: {row}"
    return rows


@cache
def mapped() -> tuple[Mapped, ...]:
    return tuple(Mapped(**row) for row in table("traceability.tsv"))


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of a file's tests, read without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def trouble(row: Mapped) -> str:
    """What is wrong with a row by itself; empty if nothing is."""
    if row.status not in STATUSES:
        return f"unknown status {row.status!r}"
    if row.seed != row.id[:3]:
        return f"is no row of seed {row.seed}"
    if row.status == "test" and not row.tests:
        return "names no test"
    if row.status == "deviation" and len(row.note.split()) < 6:
        return "gives no reason"
    if row.status == "later" and row.where not in (f"issue {number}: {title}" for number, title in ISSUES.items()):
        return f"is left to {row.where!r}, which is no issue that is open"
    for test in row.tests:
        lost = missing(test)
        if lost:
            return lost
    return ""


def missing(test: str) -> str:
    """Why ``file::function`` is no test of this repository; empty if it is one."""
    file, separator, function = test.partition("::")
    path = REPOSITORY / file
    if not separator or not file.startswith("tests/") or not Path(file).name.startswith("test_") or not path.is_file():
        return f"{test}: no such file of tests"
    if not function.startswith("test_") or function not in functions(path):
        return f"{test}: no such function"
    return ""


def test_the_list_of_rows_is_whole() -> None:
    rows = table("seed_rows.tsv")
    assert Counter(row["seed"] for row in rows) == ROWS
    assert len({row["id"] for row in rows}) == len(rows) == 427
    assert all(row["id"].startswith(row["seed"] + "-") and row["section"] and row["kind"] for row in rows)


def test_every_row_is_mapped_once_in_the_order_of_the_list() -> None:
    assert [row.id for row in mapped()] == [row["id"] for row in table("seed_rows.tsv")]


@pytest.mark.parametrize("seed", ROWS)
def test_every_mapping_holds(seed: str) -> None:
    wrong = {row.id: said for row in mapped() if row.seed == seed and (said := trouble(row))}
    assert wrong == {}


def test_what_the_notes_refer_to_exists() -> None:
    entries = knowledge().entries
    for row in mapped():
        for name in re.findall(r"align explain (\S+?)[,;.]?(?:\s|$)", row.note):
            assert name in entries, f"{row.id}: align explain {name}"
        for test in re.findall(r"tests/\S+::\w+", row.note):
            assert missing(test) == "", row.id


def test_what_is_left_to_a_later_issue_and_is_known_says_where_the_advice_is() -> None:
    """Rows of the knowledge table that the run does not detect yet: the advice is there already."""
    for row in mapped():
        if row.id in knowledge().entries and row.status == "later":
            assert f"align explain {row.id}" in row.note, row.id


HERE = "tests/unit/test_traceability.py"
GOOD = Mapped("003-X-1", "003", "test", f"{HERE}::test_every_mapping_holds", "")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Mapped("003-X-1", "003", "done", GOOD.where, ""), "unknown status"),
        (Mapped("003-X-1", "002", "test", GOOD.where, ""), "no row of seed 002"),
        (Mapped("003-X-1", "003", "test", "", "shown somewhere"), "names no test"),
        (Mapped("003-X-1", "003", "test", "tests/unit/test_nothing.py::test_x", ""), "no such file"),
        (Mapped("003-X-1", "003", "test", "align/findings.py::to_dict", ""), "no such file"),
        (Mapped("003-X-1", "003", "test", f"{GOOD.where}; {HERE}::test_nothing", ""), "no such function"),
        (Mapped("003-X-1", "003", "test", f"{HERE}::trouble", ""), "no such function"),
        (Mapped("003-X-1", "003", "test", HERE, ""), "no such file"),
        (Mapped("003-X-1", "003", "deviation", "", "not wanted"), "gives no reason"),
        (
            Mapped("003-X-1", "003", "deviation", "tests/gone.py::test_x", "a reason of at least six words"),
            "no such file",
        ),
        (Mapped("003-X-1", "003", "later", "issue 5", ""), "no issue that is open"),
        (Mapped("003-X-1", "003", "later", "issue 3: Conditions, capture", ""), "no issue that is open"),
    ],
)
def test_a_mapping_that_does_not_hold_is_seen(row: Mapped, words: str) -> None:
    assert words in trouble(row)
    assert trouble(GOOD) == ""
