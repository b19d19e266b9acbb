"""Tables beside this file: tab-separated, a line of names first."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path


@cache
def rows_of(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a table."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as lines:
        rows = tuple(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for row in rows:
        assert None not in row and None not in row.values(), f"{name}: a line of another length: {row}"
    return rows
