"""What a transplant showed: readings of the points behind the accused operator, and the verdict on them.

The logits decide, unless the fault is too small to be told from rounding there; then the residual stream that enters
the next block does.

**repaired**: the error against the other side falls to a fifth, or from beyond what the policy allows to what clean
pairs show. A fall counts where rounding alone cannot make it: the error before was larger than that of clean pairs, or
the operator is known to err (its residual is beyond rounding, or its weights differ from the checkpoint), or nothing
at all is left of it (and the residual does not say that the operator is right).

**repair share**: where other rounding hides the fall, the two replays are still alike in everything but the output. Of
the change that the output makes, the share that goes towards the other side is 1 where the operator accounts for it,
and 1/2 where everything behind it is only rounded anew (the change is then the difference of two roundings that are
equally far from the other side; measured: 0.5 to 0.6). At 3/4 the operator accounts for as much of the change as new
rounding does. Its deviation is taken from the rows, and it must be clear of 1/2 by three of them. It confirms only an
operator that is known to err, and where what is left is not more than clean pairs show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, sqrt
from typing import Any, Literal

from torch import Tensor

from align.checkpoints.table import parse
from align.compare.policy import TensorPolicy
from align.sentences import Said, raw, said, text_of
from align.walk.transplant import LOGITS, Accusation, Plan

Verdict = Literal["confirmed", "refuted", "not measurable", "not possible"]
Outcome = Literal["confirmed", "upstream", "elsewhere", "not measurable"]
#: A fall to this part of the error is a repair.
REPAIR = 0.2
#: In units of :meth:`TensorPolicy.predicted`: what clean pairs show (measured: up to 1.8).
CLEAN = 2.0
#: How far the repair share may be from 1.
SHARE = 0.25
#: The share where everything is only rounded anew, and how many deviations it must be away from that.
ROUNDED_ANEW, DEVIATIONS = 0.5, 3


@dataclass(frozen=True)
class Floor:
    """What rounding does to a point, as relative L2: ``clean`` pairs show this much, ``allowed`` is never exceeded."""

    clean: float
    allowed: float


def floor_of(policy: TensorPolicy) -> Callable[[str], Floor]:
    """The floor of a checkpoint by its name, as the policy derives it."""

    def floor(name: str) -> Floor:
        layer = parse(name).layer
        predicted = policy.predicted(layer)
        return Floor(CLEAN * predicted, policy.allowance(name).whole)

    return floor


@dataclass(frozen=True)
class Reading:
    """One point behind the accused operator. Errors are relative L2 against the other side, over all rows.

    Attributes:
        name: the checkpoint; ``rows`` that were compared.
        none, inputs, output: the error without transplant, with the other side's inputs, and with its output as well.
        worst: of the single rows, in the same order.
        floor: what rounding does here.
        effect: how far the output alone moves it: relative L2 between the two replays.
        share, deviation: of that movement, how much goes towards the other side; ``None`` if nothing moved.
    """

    name: str
    rows: int
    none: float
    inputs: float
    output: float
    worst: tuple[float, float, float]
    floor: Floor
    effect: float
    share: float | None = None
    deviation: float | None = None


def read_point(name: str, floor: Floor, other: Tensor, none: Tensor, inputs: Tensor, output: Tensor) -> Reading:
    """Read one point; all four tensors ``[N, *channels]`` with the same rows."""
    reference, *runs = (one.flatten(1).double() for one in (other, none, inputs, output))
    size = reference.square().sum(1)
    errors = [(run - reference).square().sum(1) for run in runs]
    moved = runs[2] - runs[1]
    made, towards = moved.square().sum(1), ((reference - runs[1]) * moved).sum(1)
    total, share, deviation = float(made.sum()), None, None
    if total > 0 and isfinite(total) and isfinite(float(towards.sum())):
        share = float(towards.sum()) / total
        deviation = float((towards - share * made).square().sum().sqrt()) / total
    none_, inputs_, output_ = (_ratio(float(error.sum()), float(size.sum())) for error in errors)
    worst = [
        max((_ratio(e, s) for e, s in zip(error.tolist(), size.tolist(), strict=True)), default=0.0) for error in errors
    ]
    return Reading(
        name, len(reference), none_, inputs_, output_, (worst[0], worst[1], worst[2]), floor,
        _ratio(total, float(size.sum())), share, deviation,
    )  # fmt: skip


def _ratio(err_sq: float, ref_sq: float) -> float:
    if err_sq == 0.0:
        return 0.0
    if not isfinite(err_sq):
        return float("inf")
    return sqrt(err_sq / ref_sq) if ref_sq else float("inf")


@dataclass(frozen=True)
class Local:
    """The accused operator on the other side's inputs against what the other side made of them."""

    equal: bool
    rel_l2: float


@dataclass(frozen=True)
class TransplantResult:
    """What a transplant showed.

    Attributes:
        verdict: ``confirmed``: the operator's output repairs what its inputs do not; ``refuted``; ``not measurable``;
            ``not possible``.
        side, checkpoint: the accusation.
        why: one sentence.
        sentence: the same as data; empty in results of an earlier version.
        where: of ``refuted``, ``upstream`` or ``elsewhere``; of ``confirmed``, the point that showed it.
        inputs, output: checkpoints that were replaced.
        readings: the points, the deciding one first.
        local: see :class:`Local`.
        known: see :class:`Accusation`.
        rows: by checkpoint, how many rows every rank replaced.
        ranks: how many ranks replaced them.
        notes: what one should know.
    """

    verdict: Verdict
    side: str
    checkpoint: str
    why: str
    where: str = ""
    inputs: tuple[str, ...] = ()
    output: str = ""
    readings: tuple[Reading, ...] = ()
    local: Local | None = None
    known: bool | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 0
    notes: tuple[str, ...] = ()
    sentence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        return f"transplant of {self.checkpoint} into the {self.side}: {self.verdict}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, the summary included; numbers that are not finite become text."""
        plain: dict[str, Any] = _plain({**asdict(self), "summary": self.summary})
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def not_possible(accusation: Accusation, why: str) -> TransplantResult:
    return TransplantResult(
        "not possible", accusation.side, accusation.checkpoint, why, known=accusation.known, sentence=raw(why)
    )


# ----------------------------------------------------------------------------------------------------------- judging


def _falls(after: float, before: float, floor: Floor, counts: bool) -> bool:
    """Whether an error is repaired; ``counts``: a fall by ratio means something although rounding is as large."""
    if not isfinite(after):
        return False
    if before > floor.allowed and after <= floor.clean:
        return True
    return before > 0 and after <= REPAIR * before and (counts or before > floor.clean)


def outcome_at(reading: Reading, plan: Plan, known: bool | None) -> Outcome:
    """What one point shows."""
    floor, errs = reading.floor, known is True
    if _falls(reading.inputs, reading.none, floor, counts=False):
        return "upstream"
    whole = reading.output == 0.0 and reading.name != plan.output and known is not False
    if _falls(reading.output, reading.inputs, floor, counts=errs or whole):
        return "confirmed"
    # The rest must be rounding: next to other faults only the nearer point can tell.
    if errs and reading.output <= floor.clean and _accounts(reading):
        return "confirmed"
    if reading.none > floor.clean:
        return "elsewhere"
    return "not measurable"


def _accounts(reading: Reading) -> bool:
    """Whether what the output changes is repair, by its share."""
    if reading.share is None or reading.deviation is None:
        return False
    return abs(reading.share - 1) <= SHARE and reading.share - DEVIATIONS * reading.deviation > ROUNDED_ANEW


def judge(accusation: Accusation, plan: Plan, readings: tuple[Reading, ...], local: Local | None) -> TransplantResult:
    """The verdict on readings at the plan's points, in its order."""
    known = accusation.known
    outcomes = [outcome_at(reading, plan, known) for reading in readings]

    def result(verdict: Verdict, why: Said, where: str = "") -> TransplantResult:
        return TransplantResult(
            verdict, plan.side, plan.checkpoint, text_of(why), where, plan.inputs, plan.output, readings, local, known,
            notes=plan.notes, sentence=why,
        )  # fmt: skip

    first = readings[0] if readings else None
    if local is not None and local.equal:
        repaired = first is not None and _falls(first.inputs, first.none, first.floor, counts=True)
        if repaired:
            return result("refuted", said("transplant.upstream_same", numbers=_numbers(readings[0])), "upstream")
        return result("refuted", said("transplant.bit_by_bit", numbers=_bracket(first)), "elsewhere")
    for reading, outcome in zip(readings, outcomes, strict=True):
        numbers = _numbers(reading)
        if outcome == "confirmed":
            falls = _falls(reading.output, reading.inputs, reading.floor, counts=True)
            key = "transplant.repaired" if falls else "transplant.share_repaired"
            return result(
                "confirmed", said(key, numbers=numbers, rest=_rest(reading, readings, outcomes)), reading.name
            )
        if outcome == "upstream":
            return result("refuted", said("transplant.upstream", numbers=numbers), "upstream")
    for reading, outcome in zip(readings, outcomes, strict=True):
        if outcome == "elsewhere":
            return result("refuted", said("transplant.elsewhere", numbers=_numbers(reading)), "elsewhere")
    if known is False and first is not None:
        parts = any(_falls(one.output, one.inputs, one.floor, counts=True) for one in readings)
        key = "transplant.only_rounds_parts" if parts else "transplant.only_rounds"
        return result("refuted", said(key, numbers=_numbers(first)), "elsewhere")
    return result("not measurable", said("transplant.not_told", numbers=_bracket(readings[-1] if readings else None)))


def _rest(reading: Reading, readings: tuple[Reading, ...], outcomes: list[Outcome]) -> Said | str:
    if reading.name == LOGITS:
        return ""
    other = dict(zip((one.name for one in readings), outcomes, strict=True)).get(LOGITS)
    return said("transplant.logits_elsewhere" if other == "elsewhere" else "transplant.logits_hidden")


def _bracket(reading: Reading | None) -> Said | str:
    return "" if reading is None else said("transplant.bracket", numbers=_numbers(reading))


def _numbers(reading: Reading) -> Said:
    share: Said | str = ""
    if reading.share is not None:
        share = said("transplant.share", share=reading.share, deviation=reading.deviation or 0.0)
    errors = {"none": reading.none, "inputs": reading.inputs, "output": reading.output}
    return said("transplant.numbers", name=reading.name, **errors, clean=reading.floor.clean, share=share)
