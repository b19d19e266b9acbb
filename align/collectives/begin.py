"""Where to begin to read about experts' rows: at the recorded call that a finding is about, dispatch or combine."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from align.checkpoints.table import parse
from align.collectives.record.types import COMBINE, DISPATCH, OPERATIONS, CollectiveCall
from align.collectives.routed_sides import SUMMED
from align.findings import Finding


@dataclass(frozen=True)
class Way:
    """A part of the exchange: rows on their way to the experts, their results on the way back, or neither.

    Attributes:
        operations: that may do it, the likeliest first.
        last: of several calls of one operation in a step the last is meant, otherwise the first.
    """

    operations: tuple[str, ...]
    last: bool


@cache
def ways() -> Mapping[str, Way]:
    """By kind, or kind and name of what the evidence has.

    Raises:
        ValueError: the table names an operation that there is not, or a kind twice.
    """
    plain = tomllib.loads((resources.files("align.collectives") / "begin.toml").read_text(encoding="utf-8"))
    found: dict[str, Way] = {}
    for name, row in plain.items():
        unknown = set(row["operations"]) - set(OPERATIONS)
        if unknown or row["which"] not in ("first", "last") or found.keys() & set(row["kinds"]):
            raise ValueError(f"begin.toml: {name} is not as the others: {row}")
        found |= dict.fromkeys(row["kinds"], Way(tuple(row["operations"]), row["which"] == "last"))
    return found


def way_of(finding: Finding) -> Way | None:
    """What a finding about experts' rows is about; ``None`` of any other."""
    if finding.path != "C" or finding.checkpoint is None or parse(finding.checkpoint).kind.name != SUMMED:
        return None
    special = (f"{finding.kind} {name}" for name in finding.evidence)
    return next((ways()[key] for key in special if key in ways()), ways().get(finding.kind))


def call_about(way: Way, calls: Sequence[CollectiveCall], step: int | None) -> CollectiveCall | None:
    """The call that does it, of the rank's own step in the newest run if it has one there."""
    newest = max((one.place.generation for one in calls), default=0)
    there = [one for one in calls if (one.place.generation, one.place.step) == (newest, step)]
    for among in (there, calls):
        for operation in way.operations:
            found = [one for one in among if one.operation == operation]
            if found:
                return found[-1 if way.last else 0]
    return None


def place_of(call: Mapping[str, Any]) -> str:
    """The engine's frame that decides what a call is about: wrappers that are named after it are passed over."""
    site, operation = [str(one) for one in call.get("site") or ()], str(call.get("operation", ""))
    if operation not in (DISPATCH, COMBINE):
        site = [one for one in site if operation not in one.rpartition(" ")[2]] or site
    return site[0] if site else ""
