"""The index page of a night and its JUnit file, read back by parsers."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from align.history.changes import Change
from align.history.page import junit, page
from align.history.store import Night, Outcome
from tests.unit.align.history.nights import DEEPER, NORM, found, plan_of

NIGHT = Night(3, "nightly", "00", "2024-05-01T02:00:00+00:00", "2024-05-01T03:00:00+00:00")
HOSTILE = "<script>alert(1)</script> \x1b[31m & 'quotes'"
PLAN = plan_of("clean", "faulty", "lost", "next")


def outcomes(folder: Path) -> list[Outcome]:
    run = folder / "cases" / "faulty one"
    run.mkdir(parents=True)
    (run / "report.md").write_text("read me")
    changed = (
        Change("new", None, found(NORM)),
        Change("moved", found(NORM, 2.0), found(DEEPER, 3.0)),
        Change("fixed", found(DEEPER), None),
    )
    return [
        Outcome("clean", "aligned", seconds=12.4, directory="/elsewhere"),
        Outcome("faulty", "diverged", directory=str(run), changed=changed, findings=(found(NORM),), earlier=2),
        Outcome("lost", "not comparable", HOSTILE, failed_before=True),
    ]


class Page(HTMLParser):
    """Rows, links and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1] += f" {data.strip()}" if data.strip() else ""


def test_a_row_for_each_case_the_worst_first(tmp_path: Path) -> None:
    read = Page(page(PLAN, NIGHT, outcomes(tmp_path), True, tmp_path, True))
    first, lost, clean, left = read.rows[1:]
    assert first.startswith(" faulty ✗ diverged compared with night 2 new Path B: operator at layers.2.mlp_norm")
    assert "moved Path B: operator at layers.3.mlp_norm, 3.0 roundings. before: Path B: operator at layers.2" in first
    assert found(NORM).fingerprint in first
    assert lost.startswith(" lost ? not comparable <script>alert(1)</script>")
    assert (clean, left.split("Numbers")[0].strip()) == (" clean ✓ aligned none 12", "next … not run yet")
    assert read.links == ["cases/faulty%20one/report.md"]


def test_nothing_that_was_printed_elsewhere_is_markup(tmp_path: Path) -> None:
    text = page(PLAN, NIGHT, outcomes(tmp_path), True, tmp_path, False)
    assert "script" not in Page(text).tags and "<script>" not in text
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "")
    assert "simulated" not in text


def test_junit_has_a_test_for_each_case(tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit(PLAN, NIGHT, outcomes(tmp_path)))
    assert root.tag == "testsuites"
    (suite,) = root
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "timestamp")}
    assert list(counts.values()) == ["4", "1", "1", "1", NIGHT.started]
    told = {case.get("name"): [(one.tag, one.get("type"), one.get("message")) for one in case] for case in suite}
    assert told == {
        "clean": [],
        "faulty": [("failure", "new", f"new: {found(NORM).summary}")],
        "lost": [("error", "not comparable", HOSTILE.replace("\x1b", ""))],
        "next": [("skipped", None, "not run yet")],
    }
