"""The arguments of attention and cache operators of one side, and those of both sides beside each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from align.result.parts import Documented


class ArgumentRule(Documented):
    """All calls of one operator in one phase about which one rule has something to say."""

    rule: str
    """Its id, as ``align fa rules`` takes it."""
    severity: Literal["ERROR", "WARN", "REMIND", "INFO"]
    """An ERROR is a finding too."""
    operator: str
    """Without its namespace."""
    phase: str
    """Of the step: prefill, decode or mixed."""
    said: dict[str, str]
    """By language, with the values of the first call."""
    run: int
    """Run of the launch in which the first such call was made, from 1."""
    step: int
    """Its step."""
    rank: int
    """Its global rank."""
    layer: int
    """Its layer."""
    layers: list[int]
    """Of all such calls."""
    ranks: list[int]
    """Of all such calls."""
    steps: int
    """How many steps made such calls, of all runs of the launch."""
    calls: int
    """How many such calls there were."""
    variants: int
    """How many different sentences they give; ``said`` is the first."""
    at: list[str]
    """Call site of the first, ``file:line function``, innermost first."""
    arguments: dict[str, str]
    """Of the first, by name."""
    known: dict[str, str]
    """By language why it is harmless in this engine; empty if that is not known."""


class ArgumentsLooked(Documented):
    """Which rules were looked at for one operator in one phase."""

    operator: str
    """Without its namespace."""
    phase: str
    """Of the step."""
    calls: int
    """Of all layers, steps, runs and ranks."""
    rules: list[str]
    """Ids of the rules that were looked at, whatever came of it."""
    unseen: list[str]
    """Ids of rules that are about such calls, and could not be looked at."""


class ArgumentAudit(Documented):
    """The calls of one side against the rules of ``align fa rules``."""

    observable: bool
    """Whether calls were recorded. If not, ``unseen`` says why, and nothing is known of them."""
    calls: int = 0
    """Calls of all layers, steps, runs of the launch and ranks; warm-up and idle forwards are left out."""
    distinct: int = 0
    """How many of them differ by more than their layer."""
    operators: dict[str, int] = Field(default_factory=dict)
    """Calls of each operator."""
    phases: list[str] = Field(default_factory=list)
    """In which there were any."""
    groups: list[ArgumentRule] = Field(default_factory=list)
    """Rules that have something to say, the worst first."""
    held: int = 0
    """Rules that were looked at and hold for all calls."""
    not_observable: dict[str, str] = Field(default_factory=dict)
    """Rule to what would have to be known to check it. None of it is a pass."""
    unseen: list[str] = Field(default_factory=list)
    """What could not be described or judged, and why. None of it is a pass."""
    bytes: int = 0
    """Size of the records."""
    looked: list[ArgumentsLooked] = Field(default_factory=list)
    """By operator and phase, which rules were looked at."""


class ArgumentRow(Documented):
    """One argument of both sides' calls."""

    name: str
    """What it is, whatever the operators call it."""
    candidate: str
    """As passed; empty if it was not, or its operator has no such argument."""
    reference: str
    """As passed; empty if it was not, or its operator has no such argument."""
    verdict: Literal["equal", "benign", "different", "not observable"]
    """``benign``: other words for the same."""
    why: str = ""
    """Of ``benign``: what kind of difference it is."""
    reason: dict[str, str] = Field(default_factory=dict)
    """The same in words, by language."""


class ArgumentsBeside(Documented):
    """The attention call of both sides in the first step of a phase that computes the same rows on both."""

    phase: str
    """Of the step."""
    layers: list[int]
    """For which the comparison says the same."""
    steps: dict[str, int]
    """By side."""
    rows: list[ArgumentRow]
    """Argument by argument."""
