"""What the page shows, as data: from the result alone, every number with its scale, and text that stays text."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from align.report import html
from align.report.forms import JUNIT, forms, page_name, report_name
from align.report.page import data_of, page_of
from align.report.page_map import bend_of, shade, short
from align.report.page_numbers import number, row
from align.report.words import TEMPLATES, words_of
from align.result.build import Command, result_of
from align.result.cells import DriftPoint
from align.result.ground import Ground
from align.result.schema import Result
from align.result.tokens import tokens_of
from align.run.flow import Wishes
from align.run.report import Report
from tests.unit.align.report import pages
from tests.unit.align.result import made
from tests.unit.align.run import recordings

EVIL = "</script><script>alert(1)</script> <b>x</b> {{ 1 + 1 }} **bold** `code` [l](http://x) \u2028 \u202e"


def test_it_is_a_pure_function_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("clean", "A", "B", "C", "FA"):
        result = pages.result_of(path, tmp_path / path, monkeypatch)
        page = page_of(result)
        assert json.loads(json.dumps(page, allow_nan=False)) == json.loads(json.dumps(page_of(result)))
        again = Result.model_validate_json(result.model_dump_json())
        assert page_of(again) == page
        assert html.render(again) == html.render(result)
        assert html.render(result, "zh") != html.render(result)


def test_results_that_ended_early_have_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = made.Run(tmp_path / "stopped", monkeypatch, conditions=(recordings.condition("false"),)).go().result()
    tokens = made.Run(tmp_path / "tokens", monkeypatch, wishes=Wishes(tensors=False)).go().result()
    nothing = result_of(Report(reason="no such model"), Ground("run"), Command())
    for result, words in ((stopped, "not comparable"), (tokens, "aligned"), (nothing, "no such model")):
        for lang in ("en", "zh"):
            assert (words if lang == "en" else "<!doctype html>") in html.render(result, lang)
    assert page_of(nothing)["map"] is None
    assert "Condition eager" in html.render(stopped)


def numbers(value: Any) -> list[dict[str, Any]]:
    """Every measured number anywhere in a page."""
    if isinstance(value, dict):
        own = [value] if {"error", "bound", "ratio", "source"} <= value.keys() else []
        return own + [one for part in value.values() for one in numbers(part)]
    return [one for part in value for one in numbers(part)] if isinstance(value, list) else []


def test_no_number_is_without_a_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("clean", "A", "B", "C", "FA"):
        page = page_of(pages.result_of(path, tmp_path / path, monkeypatch))
        found = numbers(page)
        assert found, path
        for one in found:
            assert one["bound"] not in ("–", ""), (path, one)
            assert one["source"], (path, one)
        if page["findings"]:
            states = [one["state"] for one in page["findings"][0]["numbers"]]
            assert "beyond" in states, (path, page["findings"][0]["numbers"])
        for cell in (page["map"] or {"cells": []})["cells"]:
            for entry in cell["numbers"]:
                assert entry[3] not in ("–", "") and page["map"]["texts"][entry[6]], (path, cell["name"], entry)


def test_what_is_beyond_has_a_ratio_above_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.result_of("B", tmp_path / "run", monkeypatch)
    assert result.tensors is not None
    assert {one.verdict for one in result.tensors.cells} >= {"equal", "beyond"}
    for one in result.tensors.cells:
        if isinstance(one.ratio, float) and one.differing is None:
            assert (one.ratio > 1) == (one.verdict == "beyond"), one.name
    accused = next(one for one in result.tensors.cells if one.name == "layers.1.mlp.up")
    assert accused.verdict == "beyond" and accused.spread is not None
    assert accused.dtypes == {"candidate": "bfloat16", "reference": "bfloat16"}
    assert accused.shape[0] == accused.rows
    assert accused.error == pytest.approx(1.0, abs=0.01), "twice the value is off by the value"
    assert accused.spread.quantiles[-1] == max(accused.spread.quantiles)
    assert accused.spread.rows[0].rel_l2 == accused.spread.quantiles[-1]
    first = page_of(result)["map"]
    assert first["cells"][first["first"]]["name"] == "layers.1.mlp.up"


class Tags(HTMLParser):
    """Elements of a page, and the policy in its head."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_policy_allows_its_own_script_and_style_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.result_of("B", tmp_path / "run", monkeypatch)
    for served in (False, True):
        tags = Tags(html.render(result, served=served)).found
        told = next(about["content"] for _, about in tags if about.get("http-equiv") == "Content-Security-Policy")
        rules = {part.split()[0]: part.split()[1:] for part in str(told).split(";")}
        assert rules["default-src"] == ["'none'"]
        assert all(one.startswith("'sha256-") for name in ("script-src", "style-src") for one in rules[name])
        assert rules.get("connect-src") == (["'self'"] if served else None)
        assert "unsafe" not in str(told)
        assert not [about for _, about in tags if "style" in about or any(name.startswith("on") for name in about)]
        assert [about.get("src") for tag, about in tags if tag == "script"] == [None, None]
        links = [about for tag, about in tags if tag in ("link", "a", "img", "iframe", "object", "form")]
        assert all(str(one.get("href")).startswith(("#", "data:,")) for one in links)


def test_text_of_others_cannot_leave_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = pages.result_of("B", tmp_path / "run", monkeypatch)
    clean = [tag for tag, _ in Tags(html.render(base)).found]
    assert base.tensors is not None and base.case is not None and base.tokens is not None
    cells = [one.model_copy(update={"name": EVIL, "why": EVIL, "judged_by": EVIL}) for one in base.tensors.cells]
    conditions = [one.model_copy(update={"name": EVIL, "requested": EVIL, "why": EVIL}) for one in base.conditions]
    hostile = base.model_copy(
        update={
            "tensors": base.tensors.model_copy(update={"cells": cells}),
            "conditions": conditions,
            "remarks": [EVIL],
            "versions": {"candidate": {EVIL: EVIL}},
            "engines": {"candidate": EVIL, "reference": EVIL},
        }
    )
    text = html.render(hostile)
    tags = [tag for tag, _ in Tags(text).found]
    assert tags.count("script") == clean.count("script") == 2
    assert "a" not in tags[tags.index("main") :], "no sentence makes a link"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None and "<" not in data[1]
    assert json.loads(data[1])["map"]["cells"][0]["name"] == EVIL


def test_a_large_result_is_built_soon_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.large(pages.result_of("B", tmp_path / "run", monkeypatch))
    started = time.process_time()
    text = html.render(result)
    assert time.process_time() - started < 10
    assert len(text.encode()) < 3_000_000
    assert text.count('class="cell s-') == pages.LAYERS * len(pages.KINDS)


def points(*errors: float) -> list[DriftPoint]:
    return [DriftPoint(layer=at, error=error, predicted=0.01, bound=0.04) for at, error in enumerate(errors)]


@pytest.mark.parametrize(
    ("errors", "bend"),
    [
        ((0.0, 0.0, 0.0), None),
        ((0.0, 0.009, 0.01, 0.011), None),  # rounding from layer 0 on
        ((0.0, 0.018, 0.017, 0.019), None),  # as far apart as clean pairs get
        ((0.0, 0.0, 0.0, 0.005), 2),  # equal through two layers, and then not
        ((0.0, 0.008, 0.009, 0.3, 0.31), 2),
        ((0.0, 0.5, 0.5), 0),
        ((0.0, 0.01, float("inf")), 1),
    ],
)
def test_the_bend_is_where_the_error_begins(errors: tuple[float, ...], bend: int | None) -> None:
    found = [one.model_copy(update={"error": "inf"}) if one.error == float("inf") else one for one in points(*errors)]
    assert bend_of(found) == bend


def test_cells_say_their_number_and_not_by_colour_alone() -> None:
    assert [short("within", ratio) for ratio in (0.0, 0.04, 0.5, 0.999)] == [".00", ".04", ".50", "1.00".lstrip("0")]
    assert [short("beyond", ratio) for ratio in (1.6, 12.4, 123456.0, "inf", None)] == ["1.6", "12", "1e5", "∞", "≠"]
    assert (short("equal", 0.0), short("not observable", None)) == ("=", "–")
    shades = [shade("within", ratio) for ratio in (0.05, 0.2, 0.9)] + [shade("beyond", ratio) for ratio in (2, 7, 99)]
    assert shades == ["low", "mid", "high", "over", "far", "top"]


def test_a_number_against_a_bound_of_nothing() -> None:
    assert row("x", 0, 0, "exact")["state"] == "within"
    assert (row("x", 3, 0, "exact")["ratio"], row("x", 3, 0, "exact")["state"]) == ("∞", "beyond")
    assert row("x", "nan", 0.5, "rounding")["state"] == "unknown"
    assert [number(value) for value in (None, "inf", 3, 0.123456, True)] == ["–", "∞", "3", "0.1235", "True"]


def test_every_key_of_the_template_and_of_the_script_is_there() -> None:
    words = words_of("en").sentences
    template = (TEMPLATES / "page.html.jinja").read_text(encoding="utf-8")
    used = set(re.findall(r'\bw\("([\w. ]+)"[,)]', template))
    assert used and used <= words.keys()
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    named = {f"page_script.{name}" for name in re.findall(r"\bwords\.(\w+)", script)}
    assert named and named <= words.keys()


def test_the_script_gets_no_more_than_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(pages.result_of("B", tmp_path / "run", monkeypatch))
    assert data_of(page).keys() == {"lang", "map", "sites", "drift", "words"}


def test_the_chart_library_has_its_licence_beside_it() -> None:
    assert "MIT" in (TEMPLATES / html.CHARTS / "LICENSE").read_text(encoding="utf-8")


def test_both_sides_candidates_stand_beside_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch).go().result()
    assert result.tokens is not None
    run = result.tokens.free
    assert all(one.ids["candidate"] == one.ids["reference"] for one in run.requests)
    different: dict[str, dict[str, tuple[int, ...]]] = {"candidate": {"r0": (5, 6)}, "reference": {"r0": (5, 9)}}
    generated = {side: recordings.generations(ids) for side, ids in different.items()}
    told = tokens_of({"free": made.comparison(different["candidate"], different["reference"])}, generated)
    assert told is not None and told.first is not None
    assert {side: top[0].id for side, top in told.first.top.items()} == {"candidate": 6, "reference": 9}
    (only,) = page_of(result.model_copy(update={"tokens": told}))["tokens"]["differences"]
    assert only["top"]["candidate"].startswith("6 (") and only["top"]["reference"].startswith("9 (")
    columns = page_of(result.model_copy(update={"tokens": told}))["tokens"]["requests"][0]["columns"]
    assert [one["state"] for one in columns] == ["same", "different"]


def test_cosine_is_told_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.result_of("B", tmp_path / "run", monkeypatch)
    assert result.tensors is not None
    page = page_of(result)
    assert page["drift"]["cosine"] == ["1"] * len(result.tensors.drift), "block_in is equal in front of both layers"
    cell = next(one for one in page["map"]["cells"] if one["name"] == "layers.1.mlp.up")
    assert cell["views"]["cosine"][0] in ("same", "low"), "twice a vector points where it did"
    large = page_of(pages.large(result))["map"]["cells"][0]
    assert large["views"]["cosine"][1] == "9e-5"  # 1 - 0.99991234
    assert "cosine" in page["map"]["views"]


def test_the_ten_furthest_apart_are_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.result_of("B", tmp_path / "run", monkeypatch)
    found = page_of(result)["map"]
    assert [found["cells"][at]["name"] for at in found["furthest"]][:1] == ["layers.1.mlp.up"]
    page = page_of(pages.large(result))["map"]
    assert len(page["furthest"]) == 10
    assert {page["cells"][at]["verdict"] for at in page["furthest"]} == {"beyond"}


def test_numbers_that_are_not_finite_cost_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        for name in ("layers.0.mlp.up", "layers.0.mlp.down", "layers.1.block_in", "layers.1.mlp.up"):
            tensors[name][0, 0] = float("nan")
            tensors[name][-1, -1] = float("inf")

    result = made.Run(tmp_path, monkeypatch, broken).go().result()
    text = html.render(result)
    data = json.loads(text.split('type="application/json"')[1].split(">", 1)[1].split("</script>")[0])
    assert "inf" in data["drift"]["error"], "as a text, which the script leaves out of the curve"
    assert "∞" in text
    for lang in ("en", "zh"):
        assert {name for name, _ in forms(result, lang)} == {report_name(lang), page_name(lang), JUNIT}


def test_layers_that_could_not_be_compared_are_no_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path, monkeypatch).go().result()
    assert result.tensors is not None
    assert "there is no drift" in html.render(result)
    first = result.tensors.drift[:1]
    cut = result.model_copy(update={"tensors": result.tensors.model_copy(update={"drift": first})})
    text = html.render(cut)
    assert "there is no drift" not in text
    assert "In front of layer 1 the sides could not be compared, so that nothing is known of it there." in text
