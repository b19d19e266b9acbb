"""What a run is to find out, and whether its model can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from adapters.base import Generation
from align.calibrate.choose import NONE
from align.checkpoints.table import Structure, structure_of
from align.errors import UserError
from align.models.info import ModelInfo
from align.run.judge import DEFAULT_COVERAGE
from align.run.recording import DEFAULT_BUDGET_MB
from align.run.routing import AUTO
from align.walk.transplant import Accusation


@dataclass(frozen=True)
class Wishes:
    """What a run is to find out, apart from the case.

    Attributes:
        tensors: record and compare them; otherwise tokens alone.
        replay: without tensors: teacher-forced replay ``auto`` (when tokens differ), ``always`` or ``never``.
        policy: how tensors are judged.
        allow: conditions that need not hold.
        values: patterns of checkpoints whose values are kept; empty leaves it to the budget.
        budget: bytes of values per side.
        min_coverage: percent of the checkpoints without which nothing is called aligned.
        along: what the recording follows, instead of what the reference generates.
        floor: which calibrated floor narrows the derived policy.
        confirm: transplant at the first finding that accuses an operator or a weight of one side.
        accusations: transplants to be made besides, whatever was found.
        lean: record as little as still names a fault (:mod:`adapters.probe.lean`).
        fresh: run the case in a fresh engine of each side as well, whether or not a side repeats itself.
        routing: when the candidate is recorded once more with the reference's choice of experts, see
            :data:`align.run.routing.MODES`.
    """

    tensors: bool = True
    replay: str = "auto"
    policy: Literal["derived", "seed"] = "derived"
    allow: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    budget: int = DEFAULT_BUDGET_MB * 10**6
    min_coverage: float = DEFAULT_COVERAGE
    along: tuple[Generation, ...] | None = None
    floor: str = NONE
    confirm: bool = True
    accusations: tuple[Accusation, ...] = ()
    lean: bool = False
    fresh: bool = False
    routing: str = AUTO


def structure_or_none(info: ModelInfo, tp: int) -> Structure | None:
    """The model's checkpoints; ``None`` if none are defined for its architecture."""
    try:
        return structure_of(info.config, tp)
    except ValueError:
        return None


def check_recordable(info: ModelInfo, tp: int) -> Structure:
    """The model's checkpoints.

    Raises:
        UserError: none are defined for its architecture.
    """
    try:
        return structure_of(info.config, tp)
    except ValueError as error:
        raise UserError(str(error), "compare the tokens alone: --no-tensors") from None
