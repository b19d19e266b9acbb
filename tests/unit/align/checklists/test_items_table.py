"""The table of items: whole, in both languages, and about things that there are."""

from __future__ import annotations

import csv
import re
from collections import Counter

import pytest

from align.checklists import alignment, quick, troubleshooting
from align.checklists.table import items, lists
from align.conditions.table import NAMES
from align.fa import rules
from align.findings import PATHS
from align.knowledge import PATHS_ZH, knowledge
from align.ledger.table import checks
from align.result.schema import Result
from align.sentences import sentences
from envs.home import REPOSITORY

CHINESE = re.compile(r"[\u4e00-\u9fff]")
#: Lists of the seeds → how many items each has, and how the ids of their rows begin.
ROWS = {"quick": (17, "000-Q"), "alignment": (10, "003-CK-"), "troubleshooting": (8, "003-TS-")}


def test_every_item_of_the_seeds_lists_is_there_once_in_order() -> None:
    with (REPOSITORY / "tests" / "seed_rows.tsv").open(encoding="utf-8", newline="") as lines:
        ids = [row["id"] for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
    wanted = [one for one in ids if one.startswith(tuple(prefix for _, prefix in ROWS.values()))]
    assert list(items()) == wanted
    assert Counter(one.list for one in items().values()) == {name: count for name, (count, _) in ROWS.items()}
    for name, (count, prefix) in ROWS.items():
        found = [one for one in items().values() if one.list == name]
        assert [one.number for one in found] == list(range(1, count + 1))
        assert all(one.id.startswith(prefix) and int(one.id.removeprefix(prefix)) == one.number for one in found)


def test_every_item_has_a_judge_and_no_judge_is_left_over() -> None:
    judged = {**quick.JUDGES, **alignment.JUDGES, **troubleshooting.JUDGES}
    assert list(judged) == list(items())


@pytest.mark.parametrize("item", items().values(), ids=lambda one: one.id)
def test_an_item_says_what_it_is_in_both_languages_and_what_decides_it(item: object) -> None:
    one = items()[item.id]  # type: ignore[attr-defined]
    assert len(one.text.en) > 15 and not CHINESE.search(one.text.en)
    assert CHINESE.search(one.text.zh)
    assert one.decides or one.rules
    assert one.mend in sentences("en").keyed
    assert set(one.rules) <= {rule.id for rule in rules()}


def test_the_rules_of_an_item_are_those_that_name_it_as_their_source() -> None:
    """Whoever adds a rule about an item adds it here; Q05 has the rules that are about one phase, whatever their
    source."""
    for name, one in items().items():
        named = [rule.id for rule in rules() if name in re.findall(r"000-Q\d+", rule.source)]
        of_a_phase = [rule.id for rule in rules() if rule.phases]
        assert sorted(one.rules) == sorted(of_a_phase if name == "000-Q05" else named), name


def test_what_decides_an_item_exists() -> None:
    for one in items().values():
        for what in one.decides:
            group, _, names = what.partition(": ")
            if group == "conditions":
                assert set(names.split(", ")) <= set(NAMES), one.id
            if group == "findings" and names:
                kinds = {*checks(), *knowledge().entries, "inputs"}
                assert set(names.split(", ")) <= kinds, one.id
            top = group.partition(".")[0]
            assert top in Result.model_fields, one.id


def test_lists_have_sources_and_say_what_a_failure_means() -> None:
    assert list(lists()) == list(ROWS)
    for one in lists().values():
        assert one.source.startswith("seed ")
        assert all(CHINESE.search(text.zh) and not CHINESE.search(text.en) for text in (one.title, one.about))


def test_the_words_for_paths_are_those_of_the_knowledge() -> None:
    words = sentences("zh").words
    assert {words[PATHS[path]] for path in "ABC"} == {PATHS_ZH[path] for path in "ABC"}
