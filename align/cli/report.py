"""``align report``: the report of a run once more, from its ``result.json`` alone."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from align.cli.leave import report_name
from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError
from align.report.document import language, render
from align.result.schema import SCHEMA_VERSION, Result
from align.run.directory import CASE, RESULT, disk_error

#: ``--out`` for standard output.
STDOUT = "-"


def execute(run: Path, lang: str, out: str | None, json: bool = False) -> int:
    """Write the report and say where it is.

    Raises:
        UserError: there is no result, or the report cannot be written.
    """
    lang = language(lang)
    file = run / RESULT if run.is_dir() else run
    text = render(read_result(file), lang)
    if out == STDOUT:
        if json:
            print_json({"report": None, "lang": lang, "text": text})
        else:
            sys.stdout.write(text)
        return EXIT_ALIGNED
    target = file.with_name(report_name(lang)) if out is None else Path(out)
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise disk_error(error, target) from error
    if json:
        print_json({"report": str(target), "lang": lang, "text": text})
    else:
        print(f"report: {target}")
    return EXIT_ALIGNED


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
