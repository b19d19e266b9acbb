"""``report.html`` as a browser shows it: content, details behind a click, what it asks for, and who can read it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from align.report import html
from align.result.schema import Result
from align.serve.server import PageServer
from align.serve.values import Values
from tests.unit.align.report import pages
from tests.unit.align.report.browser import DESK, PHONE, Browser, started
from tests.unit.align.result import made

PATHS = ("clean", "A", "B", "C", "FA")
#: Of each path, what stands in the heading, and in the section that is its own.
SHOWN = {
    "clean": ("aligned", "tokens", "2 of 2 requests equal"),
    "A": ("KV-cache indices", "findings", "Slot that was used"),
    "B": ("layers.1.mlp.up", "findings", "operator precision"),
    "C": ("communication and parallelism", "collectives", "✗ wrong"),
    "FA": ("FlashAttention arguments", "arguments", "fa.scale.model"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Result]]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("results")
        yield {path: pages.result_of(path, root / path, patch) for path in PATHS}


def written(result: Result, directory: Path, lang: str = "en") -> str:
    file = directory / "report.html"
    file.write_text(html.render(result, lang), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("path", PATHS)
def test_a_page_says_what_it_must_and_asks_for_nothing(
    path: str, browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    url = written(results[path], tmp_path)
    browser.open(url)
    heading, section, words = SHOWN[path]
    assert heading.lower() in browser.run("return document.querySelector('header').innerText").lower()
    assert words in browser.run("return document.getElementById(arguments[0]).innerText", section)
    assert browser.requests() == [url]
    assert browser.complaints() == []
    assert browser.violations() == []
    assert browser.run("return document.querySelectorAll('script[src], link[rel=stylesheet], img, iframe').length") == 0


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (PHONE, "dark"), (DESK, "dark")])
def test_everybody_can_read_it(
    size: tuple[int, int], scheme: str, browser: Browser, results: dict[str, Result], tmp_path: Path
) -> None:
    for path in ("B", "C"):
        browser.open(written(results[path], tmp_path), size, scheme)
        assert browser.violations() == [], path
        assert browser.complaints() == [], path
        # Wide tables scroll by themselves; the page does not scroll sideways.
        assert browser.run("return document.documentElement.scrollWidth") <= size[0], path


def test_a_click_and_keys_show_details(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    browser.open(written(results["B"], tmp_path))
    panel = "return document.getElementById('detail').innerText"
    accused = browser.run(panel)
    assert accused.startswith("layers.1.mlp.up") and "accused by finding 1" in accused
    assert "Distribution over rows" in accused and "Worst channels" in accused
    assert "align open" in accused
    pressed = "return [...document.querySelectorAll('[aria-pressed=true]')].map((one) => one.dataset.at)"
    (at,) = browser.run(pressed)
    assert browser.run("return document.querySelectorAll('button.cell[tabindex=\"0\"]').length") == 1
    browser.run(
        "const cell = document.querySelector('button.cell[tabindex=\"0\"]'); cell.focus();"
        "cell.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}));"
        "document.activeElement.click();"
    )
    beside = browser.run(panel)
    assert browser.run(pressed) == [str(int(at) - 1)]
    assert beside.startswith("layers.1.mlp.gate")
    assert browser.run("return document.activeElement.tabIndex") == 0
    # Another view shows what the operator of one side added.
    browser.run("const one = document.querySelector('input[value=candidate]'); if (one) one.click();")
    assert browser.complaints() == []


def test_a_chart_stands_where_there_is_drift(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    browser.open(written(pages.large(results["B"]), tmp_path))
    assert browser.run("return document.querySelectorAll('#drift-chart canvas').length") == 1
    assert f"in layer {pages.WRONG}" in browser.run("return document.querySelector('#drift .bend').innerText")
    assert browser.run("return document.querySelectorAll('#detail canvas').length") == 1, "the error by step"
    in_sight = (
        "const cell = document.querySelector('button.cell[aria-pressed=true]').getBoundingClientRect(),"
        " box = document.querySelector('.tall').getBoundingClientRect();"
        "return [cell.left >= box.left && cell.right <= box.right, scrollY]"
    )
    browser.open(written(pages.large(results["B"]), tmp_path), PHONE)
    assert browser.run(in_sight) == [True, 0], "of a wide map, and the page stays at its top"


def test_a_large_page_is_there_soon_and_scrolls(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    url = written(pages.large(results["B"]), tmp_path)
    browser.open(url, PHONE)
    assert browser.run("return document.querySelectorAll('#map .tall button.cell').length") == 64 * 20
    taken = browser.run("return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert taken < 10_000
    scrolled = browser.run(
        "const box = document.querySelector('.tall'); box.scrollTop = 400; box.scrollLeft = 200;"
        "return [box.scrollTop, box.scrollLeft, box.querySelector('tbody th').getBoundingClientRect().left >="
        " box.getBoundingClientRect().left - 1]"
    )
    assert scrolled == [400, 200, True], "the layers' numbers stay in sight"
    assert browser.violations() == []
    assert browser.complaints() == []


def test_it_is_whole_without_scripts_and_in_print(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    driver = browser.driver
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(written(results["A"], tmp_path))
        text = driver.page_source
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "Slot that was used" in text
    browser.open(written(results["B"], tmp_path), scheme="dark")
    folded = "return document.querySelectorAll('details:not([open])').length"
    before = browser.run(folded)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert before > 0 and browser.run(folded) == 0, "on paper everything is unfolded"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(folded) == before
    printed = driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(printed["data"]) > 10_000
    assert browser.complaints() == []


def test_text_of_others_stays_text(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    base = results["B"]
    first = base.findings[0].model_copy(update={"summary": evil, "next": evil, "kind": evil, "checkpoint": evil})
    assert base.tensors is not None and base.case is not None
    cells = [one.model_copy(update={"name": evil, "why": evil, "kind": evil}) for one in base.tensors.cells]
    hostile = base.model_copy(
        update={
            "reason": evil,
            "findings": [first],
            "engines": {"candidate": evil, "reference": evil},
            "case": base.case.model_copy(update={"model": evil}),
            "tensors": base.tensors.model_copy(update={"cells": cells}),
        }
    )
    url = written(hostile, tmp_path)
    browser.open(url)
    assert "taken" not in browser.run("return document.title").replace(evil, "")
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    assert "<script>document.title" in browser.run("return document.getElementById('detail').innerText")
    assert browser.requests() == [url]
    assert browser.complaints() == []


def test_chinese(browser: Browser, results: dict[str, Result], tmp_path: Path) -> None:
    browser.open(written(results["B"], tmp_path, "zh"), PHONE)
    assert browser.run("return document.documentElement.lang") == "zh-CN"
    assert "为什么可信" in browser.run("return document.body.innerText")
    assert "各行的分布" in browser.run("return document.getElementById('detail').innerText")
    assert browser.violations() == []


def test_a_served_page_shows_captured_values(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go()
    page = html.render(run.result(), served=True)
    with closing(Values(run.directory)) as values, PageServer(0, page, values.read) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            browser.open(server.url)
            text = "return document.querySelector('#detail .values').innerText"
            assert "Show captured values" in browser.run(text)
            browser.run("document.querySelector('#detail .values button').click()")
            browser.wait("return document.querySelectorAll('#detail .values canvas').length === 1")
            assert "difference" in browser.run(text) and "bfloat16[" in browser.run(text)
            assert browser.violations() == []
            asked = browser.requests()
            assert asked[0] == server.url
            assert [one.startswith(f"{server.url}values?name=layers.1.mlp.up") for one in asked[1:]] == [True]
            assert browser.complaints() == []
        finally:
            server.shutdown()
            thread.join()
