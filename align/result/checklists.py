"""The checklists of a result."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from align.result.parts import Documented

State = Literal["ok", "failed", "not observable", "not applicable"]


class ChecklistItem(Documented):
    """One item of a list, evaluated on this run."""

    id: str
    """Row of the seed, as ``align explain`` and ``align checklist --list`` know it."""
    number: int
    """In its list, from 1."""
    state: State
    """``ok``: it was evaluated on this run, and nothing is wrong. ``failed``: it does not hold; of troubleshooting: it
    is what this run shows. ``not observable``: the run lacks what decides it, which is no pass. ``not applicable``: its
    subject is not in this run."""
    count: int | None = None
    """On how many of what ``what`` names it was evaluated; null unless ``ok`` or ``failed``."""
    what: str
    """Evidence or reason, one sentence."""
    told: dict[str, Any]
    """The same as data."""
    findings: list[int] = Field(default_factory=list)
    """Numbers of the result's findings that it rests on, from 1."""
    mend: str = ""
    """What would make it observable; empty unless it is not."""
    mend_told: dict[str, Any] | None = None
    """The same as data."""


class Checklist(Documented):
    """One list."""

    name: Literal["quick", "alignment", "troubleshooting"]
    """``quick``: seed 000 §2.2, attention and cache. ``alignment``: seed 003, what must have been done.
    ``troubleshooting``: seed 003, known entries: does this run show it?"""
    counts: dict[str, int]
    """Items by state."""
    items: list[ChecklistItem]
    """In the seed's order."""
