"""The calibrated floor as a policy takes it: how far right engines were apart, with a margin, by kind and metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: What a carried tensor is judged by.
METRICS = ("whole", "token", "channel", "head")


@dataclass(frozen=True)
class FloorRule:
    """What was calibrated, as thresholds; :mod:`align.calibrate` makes it from a floor file.

    Attributes:
        name: of the floor.
        simulated: it was calibrated on a simulated device.
        limits: kind of checkpoint → metric → largest relative L2 of right engines, margin included, in units of what
            the dtype and the depth predict (:meth:`align.compare.policy.TensorPolicy.predicted`).
        factor: on every limit, where the floor was calibrated in other circumstances.
        why: of the factor, in words; empty for 1.
        wider: whether a limit may exceed the derived bound.
    """

    name: str
    simulated: bool
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    factor: float = 1.0
    why: str = ""
    wider: bool = False

    def limit(self, kind: str, metric: str) -> float | None:
        """In units of the prediction; ``None`` if it was not calibrated."""
        found = self.limits.get(kind, {}).get(metric)
        return None if found is None else found * self.factor

    @property
    def words(self) -> str:
        """Which floor judges, for reports."""
        about = ["simulated"] if self.simulated else []
        about += [f"× {self.factor:g}: {self.why}"] if self.factor != 1.0 else []
        return f"calibrated floor {self.name}" + (f" ({', '.join(about)})" if about else "")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> FloorRule:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**plain)
