"""The options of ``align run``, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from align.calibrate.choose import AUTO
from align.case.schema import Case
from align.run.directory import RunDirectory


@dataclass(frozen=True)
class RunSettings:
    """The options of ``align run``; ``None`` means not given."""

    model: str | None
    prompts: Path | None
    case_file: Path | None
    device: str
    dtype: str | None
    layout: tuple[int | None, int | None, int | None]
    max_new_tokens: int | None
    block_size: int | None
    numerics: tuple[str, ...]
    sets: tuple[str, ...]
    patches: tuple[str, ...]
    allow: tuple[str, ...]
    policy: str
    min_coverage: float
    tensors: bool
    capture: tuple[str, ...]
    values_budget: int | None
    replay: str
    out: Path | None
    launch_timeout: float
    step_timeout: float
    quiet: bool
    verbose: bool
    symptom: str | None = None
    onset: str | None = None
    batching: str | None = None
    stage: str | None = None
    baseline: str | None = None
    interactive: bool = False
    lang: str = "en"
    json: bool = False
    only: tuple[str, ...] = ()
    dry: bool = False
    #: Simpler layouts: ``always``, ``never``, or ``auto`` if a parallel layout diverges.
    ladder: str = "never"
    #: Instead of the ladder's table: layouts as typed.
    layouts: tuple[str, ...] = ()
    min_tp: int | None = None
    #: Of one device, in GB.
    device_memory: float | None = None
    #: An engine against itself: ``self``, ``LAYOUT`` or ``SIDE:LAYOUT``; empty for the two engines.
    against: str = ""
    #: A rung of a ladder: whoever walks it prints one line.
    rung: bool = False
    #: Instead of the options that make a case.
    case: Case | None = None
    #: Instead of a new directory: that of a run which is taken up again.
    #: It is cleared once nothing can be refused any more.
    reopened: RunDirectory | None = None
    #: As it was typed, where it is not this process's own.
    command: tuple[str, ...] | None = None
    #: Whether the user named the model and the layout, where the options do not tell.
    named: tuple[bool, bool] | None = None
    floor: str = AUTO
    #: Ids by request that the recording follows.
    along: Mapping[str, tuple[int, ...]] | None = None
    #: Directory of the run that this one repeats.
    earlier: str = ""
    #: Transplants: at the headline, and where the user accuses somebody (``SIDE:CHECKPOINT``).
    confirm: bool = True
    accuse: tuple[str, ...] = ()
    lean: bool = False
    audit: bool = True
    fa: bool = True
    fresh: bool = False
    #: ``--replay-routing``.
    routing: str = "auto"
