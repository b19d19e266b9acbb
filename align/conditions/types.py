"""The result of judging one condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from align.sentences import Said

Verdict = Literal["ok", "false", "unknown"]


@dataclass(frozen=True)
class Condition:
    """One controlled setting.

    Attributes:
        name: what ``--allow`` takes.
        requested: what the case, the checkpoint or the procedure demands.
        requested_from: where that comes from, in words.
        observed: by side, as read back; ``None`` where it could not be read.
        where: by side, the attribute or file that said so.
        verdict: ``ok``, ``false``, or ``unknown`` if it could not be read back.
        why: what the verdict rests on.
        mend: what to do about it, for the sides that need it.
        source: the document that demands it.
        required: whether it stops the comparison unless it is ok; the others inform.
        allowed: the user goes on without it.
        sides: those that do not meet it.
        places: by side, modules whose value is not what is requested, where the others' is.
        told: it does not stop the comparison: the engine computes otherwise than its checkpoint says, which is a
            finding (:mod:`align.conditions.told`).
        why_told: ``why`` as data; ``None`` where it was made as text.
    """

    name: str
    requested: Any
    requested_from: str
    observed: Mapping[str, Any]
    where: Mapping[str, str]
    verdict: Verdict
    why: str
    mend: str
    source: str
    required: bool = True
    allowed: bool = False
    sides: tuple[str, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    told: bool = False
    why_told: Said | None = None

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    @property
    def blocks(self) -> bool:
        """Whether the comparison must stop here."""
        return self.required and not self.ok and not self.allowed and not self.told

    @property
    def taints(self) -> bool:
        """Whether a verdict that rests on it must say so: it does not hold and the user went on."""
        return self.required and not self.ok and self.allowed and not self.told

    def allow(self) -> Condition:
        return replace(self, allowed=True)

    def to_dict(self) -> dict[str, Any]:
        """Made of JSON-able values."""
        return {
            **asdict(self),
            "observed": dict(self.observed),
            "where": dict(self.where),
            "sides": list(self.sides),
            "places": {side: list(names) for side, names in self.places.items()},
            "blocks": self.blocks,
        }
