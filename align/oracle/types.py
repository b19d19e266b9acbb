"""What the oracle says of a checkpoint: plain data, apart from the policy that it was judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch

from align.compare.residual import ResidualVerdict

Tensor = torch.Tensor
Outcome = Literal["within", "beyond", "not observable"]
#: Members of a profile that :meth:`Profile.to_dict` names.
NAMED = 8


class NotObservableError(ValueError):
    """Something cannot be recomputed; the message says why."""


class RowPlace(NamedTuple):
    """One recomputed row: of which request and position, in which step. ``rank`` is that of a summand, else -1."""

    request: str
    position: int
    step: int
    rank: int = -1


@dataclass(frozen=True)
class Skipped:
    """Rows of one step that were not judged.

    Attributes:
        step: -1 for all.
        rows: how many; -1 if the step does not tell.
        why: one sentence.
    """

    step: int
    rows: int
    why: str


@dataclass(frozen=True)
class Cell:
    """One element.

    Attributes:
        row: where it was recorded.
        channel: flat canonical channel.
        head: of a checkpoint with two axes of channels, else -1.
        recorded, exact: its two values; ``exact`` is that of float64.
        bound: the largest error that a right kernel may have here.
    """

    row: RowPlace
    channel: int
    head: int
    recorded: float
    exact: float
    bound: float


@dataclass(frozen=True, eq=False)
class Profile:
    """The error by token, by channel or by head, float64 ``[N]`` each.

    Attributes:
        ratio: largest error of an element in units of its bound: at most 1 for a right kernel.
        gain: the factor by which all is too large, minus 1, fitted relative to the elements' magnitudes; NaN where the
            exact result is 0.
        rel_l2: norm of the error over the norm of the exact result; NaN where that is 0.
    """

    ratio: Tensor
    gain: Tensor
    rel_l2: Tensor

    def __len__(self) -> int:
        return len(self.ratio)

    def worst(self, count: int = NAMED) -> list[int]:
        """The members with the largest ratio, largest first."""
        order = torch.argsort(self.ratio.nan_to_num(nan=-1.0), descending=True, stable=True)
        return [int(index) for index in order[:count]]

    def to_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """JSON-able: the worst members, or all of them."""
        chosen = range(len(self)) if arrays else self.worst()
        rows = {name: getattr(self, name).tolist() for name in ("ratio", "gain", "rel_l2")}
        return {
            "count": len(self),
            "members": [{"index": at, **{name: plain(rows[name][at]) for name in rows}} for at in chosen],
        }


@dataclass(frozen=True, eq=False)
class OracleResult:
    """One checkpoint of one side against float64.

    Attributes:
        name, operator: the checkpoint, and the row of ``operators.tsv`` that bounds it.
        verdict: ``beyond`` if an element, token, channel or head errs more than rounding allows.
        why: one sentence for ``beyond`` and ``not observable``.
        rows: how many were judged.
        skipped: steps and rows that were not, with the reason; never silently empty.
        ratio: the largest error of an element in units of its bound.
        roundings: the same in units of ``u × magnitude``; at most ``allowed`` for a right kernel.
        worst: where that is.
        bit_equal: ``torch.equal`` of what was recorded and of the float64 result rounded once to the dtype.
        equal: share of the elements that are equal so.
        excused: elements that cannot be judged: their inputs are not finite, or the result is beyond the dtype's range.
        residual: the judgement of gains and norms, see :mod:`align.compare.residual`.
        places: of each row of ``tokens``.
        tokens, channels, heads: profiles; ``heads`` of checkpoints with heads alone.
        notes: what was assumed.
        seconds: time it took.
    """

    name: str
    operator: str
    verdict: Outcome
    why: str
    rows: int = 0
    skipped: tuple[Skipped, ...] = ()
    ratio: float = 0.0
    roundings: float = 0.0
    allowed: float = 0.0
    worst: Cell | None = None
    bit_equal: bool = False
    equal: float = 0.0
    excused: int = 0
    residual: ResidualVerdict | None = None
    places: tuple[RowPlace, ...] = ()
    tokens: Profile | None = None
    channels: Profile | None = None
    heads: Profile | None = None
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def complete(self) -> bool:
        """Whether every recorded row was judged."""
        return self.verdict != "not observable" and not self.skipped

    def to_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """JSON-able form. Without ``arrays`` of each profile only the worst members, and of ``places`` only theirs."""
        profiles = {name: getattr(self, name) for name in ("tokens", "channels", "heads")}
        found = {
            key: value
            for key, value in self.__dict__.items()
            if key not in (*profiles, "residual", "worst", "skipped", "places", "seconds")
        }
        found["ratio"], found["roundings"] = plain(self.ratio), plain(self.roundings)
        found["notes"] = list(self.notes)
        found["skipped"] = [asdict(one) for one in self.skipped]
        found["worst"] = None if self.worst is None else plain(asdict(self.worst) | {"row": self.worst.row._asdict()})
        found["residual"] = None if self.residual is None else plain(asdict(self.residual))
        for name, profile in profiles.items():
            found[name] = None if profile is None else profile.to_dict(arrays=arrays)
        for member in found["tokens"]["members"] if found["tokens"] else ():
            member["place"] = self.places[member["index"]]._asdict()
        return found


def plain(value: Any) -> Any:
    """Floats that JSON does not know become their names; tuples become lists."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value
