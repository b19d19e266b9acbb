"""The forms that a result has for people and for other programs, as files in a run's directory."""

from __future__ import annotations

from collections.abc import Iterator

from align.report import document, html, junit
from align.result.schema import Result

#: Test cases for whatever reads JUnit's format; English alone, its names are compared from run to run.
JUNIT = "junit.xml"


def report_name(lang: str) -> str:
    """``report.md`` is English whatever was asked for; another language has a file of its own beside it."""
    return "report.md" if lang == "en" else f"report.{lang}.md"


def page_name(lang: str) -> str:
    """The same of ``report.html``."""
    return "report.html" if lang == "en" else f"report.{lang}.html"


def report_names(lang: str) -> tuple[str, ...]:
    """What a run with ``--lang`` leaves for people."""
    return tuple(dict.fromkeys(name(one) for one in ("en", lang) for name in (page_name, report_name)))


def forms(result: Result, lang: str) -> Iterator[tuple[str, str]]:
    """Name and content of each form in one language, and of :data:`JUNIT`."""
    yield report_name(lang), document.render(result, lang)
    yield page_name(lang), html.render(result, lang)
    yield JUNIT, junit.render(result)
