"""``align report``: every form of a run's report once more, from its ``result.json`` alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from align.cli.output import print_json
from align.errors import EXIT_ALIGNED
from align.report import document, html, junit
from align.report.document import language
from align.report.forms import JUNIT, forms, page_name, report_name
from align.report.read import read_result
from align.result.schema import Result
from align.run.directory import RESULT, disk_error

#: ``--out`` for standard output.
STDOUT = "-"


def execute(run: Path, lang: str, out: str | None, json: bool = False) -> int:
    """Write every form of the report and say where they are; with ``out`` the one that its name asks for.

    Raises:
        UserError: there is no result, or a report cannot be written.
    """
    lang = language(lang)
    file = run / RESULT if run.is_dir() else run
    result = read_result(file)
    if out == STDOUT:
        text = document.render(result, lang)
        if json:
            print_json({"report": None, "lang": lang, "text": text})
        else:
            sys.stdout.write(text)
        return EXIT_ALIGNED
    if out is None:
        found = dict(forms(result, lang))
        written = {name: _write(file.with_name(name), text) for name, text in found.items()}
        if json:
            report, page = report_name(lang), page_name(lang)
            told = {"report": str(written[report]), "lang": lang, "text": found[report]}
            print_json({**told, "page": str(written[page]), "junit": str(written[JUNIT])})
        else:
            print("\n".join(f"report: {target}" for target in written.values()))
        return EXIT_ALIGNED
    target = Path(out)
    text = _form(target)(result, lang)
    _write(target, text)
    if json:
        print_json({"report": str(target), "lang": lang, "text": text})
    else:
        print(f"report: {target}")
    return EXIT_ALIGNED


def _form(target: Path) -> Callable[[Result, str], str]:
    """What a file of this name holds: a page, test cases, or else Markdown."""
    if target.suffix in (".html", ".htm"):
        return html.render
    if target.suffix == ".xml":
        return lambda result, lang: junit.render(result)
    return document.render


def _write(target: Path, text: str) -> Path:
    """Whole or not at all."""
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise disk_error(error, target) from error
    return target
