"""The floor file: distributions by kind of checkpoint, with everything that says what they are worth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from align.calibrate.distribution import EXCEEDED, Distribution, distribution_of
from align.calibrate.measure import RESIDUALS, Sample
from align.case.schema import Strict, explain
from align.checkpoints.table import kinds
from align.compare.floor import METRICS, FloorRule
from align.compare.policy import TensorPolicy
from align.errors import UserError
from envs.home import align_home

SUFFIX = ".json"


class FloorRun(Strict):
    """One clean execution of both engines.

    Attributes:
        name: ``run1``.
        change: how it differs from the first, in words.
        numerics: of the simulated operators, by side; empty on hardware.
        verdict: of the run; only clean ones make a floor.
        directory: of the run.
    """

    name: str
    change: str
    numerics: dict[str, str] = Field(default_factory=dict)
    verdict: str
    directory: str


class Provenance(Strict):
    """Where a floor comes from.

    Attributes:
        created: ISO 8601 with the offset from UTC.
        command: as it was typed.
        align: version of this program.
        versions: packages by engine.
        device: ``simnpu`` or ``ascend``.
        simulated: whether a side ran on a simulated device, which says nothing about real kernels.
        model, fingerprint, architecture, layers: of the checkpoint.
        layout: as in ``tp1 dp1 ep1``.
        runs: what was run.
        pairs: which recordings were measured against each other.
        golden: whether golden was among them.
        rows: paired rows of the first run.
    """

    created: str
    command: tuple[str, ...]
    align: str
    versions: dict[str, dict[str, str]]
    device: str
    simulated: bool
    model: str
    fingerprint: str
    architecture: str
    layers: int
    layout: str
    runs: tuple[FloorRun, ...]
    pairs: tuple[str, ...]
    golden: bool
    rows: int


class KindFloor(Strict):
    """One kind of checkpoint.

    Attributes:
        carried: metric of :data:`align.compare.floor.METRICS` → relative L2 between two sides, in units of what dtype
            and depth predict.
        golden: the same between a side and golden; empty without golden.
        operator: metric of :data:`align.calibrate.measure.RESIDUALS` → what the operator added, as a part of what it
            may add. Not a threshold: those bounds are derived and do not depend on a device.
    """

    carried: dict[str, Distribution] = Field(default_factory=dict)
    golden: dict[str, Distribution] = Field(default_factory=dict)
    operator: dict[str, Distribution] = Field(default_factory=dict)

    def limit(self, metric: str) -> float | None:
        """The threshold of a metric in units of the prediction, ``None`` if it was not measured.

        Largest × margin of the pairs of sides. Golden is right as well, but rounds nowhere where both sides round
        alike: what it is apart is no noise between sides, yet a right engine may be that far.
        """
        found = self.carried.get(metric)
        if found is None:
            return None
        other = self.golden.get(metric)
        return max(found.limit, 0.0 if other is None else other.largest)


class Floor(Strict):
    """One floor file.

    Attributes:
        name: of the floor; the file is called after it.
        dtype: of the engines.
        exceeded: probability, for each test, with which a right engine exceeds a threshold.
        kinds: by name, in the table's order.
    """

    schema_version: Literal[1] = 1
    name: str
    dtype: str
    exceeded: float = EXCEEDED
    provenance: Provenance
    kinds: dict[str, KindFloor]

    def to_text(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, file: Path) -> None:
        """Write it whole or not at all.

        Raises:
            UserError: not writable.
        """
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.to_text(), encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            raise UserError(
                f"cannot write {file}: {error.strerror or error}", "name another file: align calibrate --out FILE"
            ) from error

    def rule(self, factor: float = 1.0, why: str = "", wider: bool = False) -> FloorRule:
        """As a policy takes it."""
        limits: dict[str, dict[str, float]] = {}
        for kind, found in self.kinds.items():
            known = {metric: found.limit(metric) for metric in METRICS}
            limits[kind] = {metric: limit for metric, limit in known.items() if limit is not None}
        return FloorRule(self.name, self.provenance.simulated, limits, factor, why, wider)


def floors_dir() -> Path:
    """Where floors lie."""
    return align_home() / "floors"


def load_floor(file: Path) -> Floor:
    """Read a floor file.

    Raises:
        UserError: missing, damaged, or of another version.
    """
    try:
        return Floor.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise explain(error, str(file)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"the floor {file} cannot be read: {error}", "make it again: align calibrate") from None


def floor_of(
    name: str,
    dtype: str,
    provenance: Provenance,
    sides: Iterable[Sample],
    golden: Iterable[Sample] = (),
    operators: Iterable[Sample] = (),
) -> Floor:
    """From numbers to a floor.

    Raises:
        ValueError: a number is not finite: a run was not clean.
    """
    parts = {"carried": _grouped(sides), "golden": _grouped(golden), "operator": _grouped(operators)}
    names = [kind for kind in kinds() if any(kind in part for part in parts.values())]
    return Floor(
        name=name,
        dtype=dtype,
        provenance=provenance,
        kinds={kind: KindFloor(**{what: part.get(kind, {}) for what, part in parts.items()}) for kind in names},
    )


def _grouped(samples: Iterable[Sample]) -> dict[str, dict[str, Distribution]]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for one in samples:
        found.setdefault((one.kind, one.metric), []).append(one)
    order = [*METRICS, *RESIDUALS]
    result: dict[str, dict[str, Distribution]] = {}
    for kind, metric in sorted(found, key=lambda key: order.index(key[1])):
        group = found[kind, metric]
        result.setdefault(kind, {})[metric] = distribution_of(
            [one.value for one in group], [one.raw for one in group], [one.where for one in group]
        )
    return result


def derived_units(dtype: str) -> Mapping[str, float]:
    """The derived allowances by metric, in units of the prediction: what a floor narrows."""
    policy = TensorPolicy.derived(dtype)
    return {metric: float(getattr(policy, metric)) for metric in METRICS}
