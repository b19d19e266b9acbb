"""Reading a result from its file, with what to do where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from align.errors import UserError
from align.report.forms import report_name
from align.result.schema import SCHEMA_VERSION, Result
from align.run.directory import CASE


def version_of(content: bytes) -> int | None:
    """Of the format of a result; ``None`` if it is not JSON or says none."""
    try:
        version = json.loads(content)["schema_version"]
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
