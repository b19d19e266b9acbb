"""Where an engine makes the indices of its cache: the functions behind those that use them, with live lines.

The operators that get an index are watched (:mod:`adapters.probe.cache_calls`); a wrong one was made before, by what
``index_makers.tsv`` names for each engine, in the order in which it passes them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from adapters.probe.callsite import definition
from adapters.probe.taps import locate

_FIELDS = ("engine", "index", "where")


@lru_cache(maxsize=1)
def index_makers() -> tuple[tuple[str, str, str], ...]:
    """Rows of the table: engine, ``slots`` or ``tables`` (with lengths), ``module:Class.method``."""
    lines = Path(__file__).with_name("index_makers.tsv").read_text(encoding="utf-8").splitlines()
    assert tuple(lines[0].split("\t")) == _FIELDS
    rows = [line.split("\t") for line in lines[1:]]
    return tuple((engine, index, where) for engine, index, where in rows)


def made_at(engine: str) -> dict[str, str]:
    """``slots``, ``tables`` → ``file:line function`` of what makes them in this process, one after the other.

    A patch that stands in a function's place is named instead of it. What an installed engine does not have is left
    out: a reader then knows no more than where the index was used.
    """
    found: dict[str, list[str]] = {}
    for name, index, where in index_makers():
        if name == engine:
            try:
                place = definition(locate(where))
            except (AttributeError, ImportError):
                continue
            if place:
                found.setdefault(index, []).append(f"{place} {where.rpartition(':')[2]}")
    return {index: ", ".join(places) for index, places in found.items()}
