"""The checklists in the report: counts, failed items first, reasons told once, both languages."""

from __future__ import annotations

import re

from align.checklists.evaluate import with_checklists
from align.checklists.table import items
from align.report.document import render
from align.report.markdown import escape
from align.result.schema import Result
from tests.unit.align.checklists import handmade as made
from tests.unit.align.checklists.handmade import result

#: English words of three letters and more that are no names.
ENGLISH = re.compile(r"\b(?:the|was|were|not|and|nothing|recorded|handed|observable|failed)\b")


def section(found: Result, lang: str = "en") -> str:
    title = "## Checklists" if lang == "en" else "## 检查清单"
    text = render(found, lang)
    assert text.count(title) == 1
    return text.partition(title)[2].partition("\n## ")[0]


def with_fault() -> Result:
    wrong = [made.finding(), made.finding("B", "host fallback")]
    return with_checklists(result(findings=wrong, alone=made.alone()))


def test_counts_are_a_table_and_every_item_is_there_once() -> None:
    text = section(with_fault())
    assert "| Quick checklist: attention and cache (an item that fails is a fault) | 4 | 1 | 11 | 1 |" in text
    for name, item in items().items():
        assert text.count(f"{name} ") == 1, name
        assert escape(item.text.en) in text, name


def test_what_failed_comes_first_with_its_finding() -> None:
    lines = [line for line in section(with_fault()).splitlines() if line.startswith("* ")]
    assert lines[0].startswith(
        "* **failed** 000-Q02 *All tensors that attention is handed lie on the NPU*: "
    ) and lines[0].endswith("(finding 2)")
    states = [re.match(r"\* \**(failed|not observable|ok|not shown|not applicable)\b", line) for line in lines]
    names = ["failed", "not observable", "ok", "not shown", "not applicable"]
    order = [names.index(one[1]) for one in states if one]
    assert len(order) == len(lines) and order == sorted(order) and set(order) == set(range(5))


def test_a_reason_is_told_once_for_all_items_that_have_it() -> None:
    text = section(with_checklists(result()))
    assert text.count("what attention was handed was not recorded. What would show it") == 1
    line = next(one for one in text.splitlines() if "000-Q04" in one)
    assert "000-Q16" in line and "000-Q06" not in line, "the scale has a reason of its own"


def test_it_is_chinese_in_the_chinese_report() -> None:
    text = section(with_fault(), "zh")
    assert "失败" in text and "不可观测" in text and "（发现 2）" in text
    quoted = re.sub(r"「.*?」|原文.*", "", text)
    assert not ENGLISH.search(re.sub(r"[`*]|is wrong|host fallback", "", quoted)), ENGLISH.search(quoted)


def test_a_result_without_lists_has_no_section() -> None:
    assert "## Checklists" not in render(result())
