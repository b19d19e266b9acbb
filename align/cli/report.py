"""``align report``: every form of a run's report once more, from its ``result.json`` alone."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError
from align.report import document, html, junit
from align.report.document import language
from align.report.forms import JUNIT, forms, page_name, report_name
from align.result.schema import SCHEMA_VERSION, Result
from align.run.directory import CASE, RESULT, disk_error

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


def version_of(content: bytes) -> int | None:
    """Of the format of a result; ``None`` if it is not JSON or says none."""
    try:
        version = json_module.loads(content)["schema_version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def read_result(file: Path) -> Result:
    """A result from its file.

    Raises:
        UserError: there is none, or it is of another version or damaged; says where.
    """
    case = file.with_name(CASE)
    again = f"run the case again: align run --case {case if case.is_file() else 'RUN/case.json'}"
    try:
        content = file.read_bytes()
    except OSError as error:
        if not file.exists():
            hint = "give the directory of a run, or the file that align compare --out wrote"
            raise UserError(f"{file} does not exist, so there is nothing to report", hint) from None
        raise UserError(f"{file} cannot be read: {error.strerror or error}", again) from error
    version = version_of(content)
    if version is not None and version != SCHEMA_VERSION:
        age = "an older" if version < SCHEMA_VERSION else "a newer"
        raise UserError(
            f"{file} was written by {age} version of align (its format is {version}, here it is {SCHEMA_VERSION}), and "
            "its report cannot be made again",
            f"read the report.md that it left beside it, or {again}"
            if file.with_name(report_name("en")).is_file()
            else again,
        )
    try:
        return Result.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{file} is no result of this version: {where}: {first['msg']}", again) from None
