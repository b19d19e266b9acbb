"""What ``--json`` promises, one JSON object on standard output; and tables as plain text, where no terminal reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from align.errors import UserError

#: The option's name on a command line.
JSON = "--json"


def print_json(content: Mapping[str, Any]) -> None:
    """The object, and the end of it: a reader may be waiting."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(error: UserError, code: int) -> None:
    """A failure as the object: what is wrong, what to do next, and the exit code."""
    print_json({"error": error.message, "next": error.hint, "exit": code})


def asked_in(argv: list[str]) -> bool:
    """Whether a command line asks for JSON, also one that cannot be understood otherwise."""
    words = argv[1:]
    return JSON in (words[: words.index("--")] if "--" in words else words)


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows as plain text: columns aligned, two spaces between them, nothing cut and nothing broken into lines.

    For files and pipes, where lines may be long; ``cut`` and ``awk`` find cells, as ``--json`` does better.
    """
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
