"""What a result rests on besides the report: the case, the engines as they ran, and their weights' audits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from adapters.base import SIDES, Generation
from adapters.probe.weights import read_audits
from align.case.schema import Case, parse_case
from align.errors import UserError
from align.models.info import ModelInfo
from align.run.manifest import FREE, REPLAY, generations_of, model_info_of
from align.run.outcome import Outcome
from align.run.plan import SIMULATED, SideExtras

T = TypeVar("T")


@dataclass(frozen=True)
class Ground:
    """Mappings are by side; a side that is not known is absent.

    Attributes:
        source: a joint run, or two recordings.
        case: ``None`` if the command stopped before there was one, or the recordings have none.
        info: the model; ``None`` likewise.
        engines: names.
        device: ``simnpu`` or ``ascend``; ``None`` if it is not known.
        simulated: whether any side ran on a simulated device; ``None`` if it is not known.
        versions: packages in the engine's interpreter, Python among them.
        extras: options and patches of one side alone.
        audits: records of the weights' audit, as :class:`adapters.probe.weights.Audited` has them.
        values: patterns of the checkpoints whose values the last recording kept.
        pythons: the engine's interpreter.
        pids: its host and workers.
        free, replay: what each side generated, running free and along the same tokens.
    """

    source: Literal["run", "compare"]
    case: Case | None = None
    info: ModelInfo | None = None
    engines: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    simulated: bool | None = None
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    extras: Mapping[str, SideExtras] = field(default_factory=dict)
    audits: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pythons: Mapping[str, str] = field(default_factory=dict)
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    free: Mapping[str, Sequence[Generation]] = field(default_factory=dict)
    replay: Mapping[str, Sequence[Generation]] = field(default_factory=dict)


def ground_of_run(
    case: Case | None,
    info: ModelInfo | None,
    outcome: Outcome | None,
    device: str,
    extras: Mapping[str, SideExtras],
    directory: Path | None,
) -> Ground:
    """A joint run, however far it got."""
    sides = {} if outcome is None else outcome.sides
    launched = {role: side.launched for role, side in sides.items() if side.launched is not None}
    return Ground(
        source="run",
        case=case,
        info=info,
        engines={} if case is None else {role: getattr(case, role) for role in SIDES},
        device=device,
        simulated=device == SIMULATED or any(one.simulated for one in launched.values()),
        versions={role: {**one.versions, "python": one.python_version} for role, one in launched.items()},
        extras=extras,
        audits={role: found for role in sides if directory is not None and (found := read_audits(directory / role))},
        values={role: side.captures[-1].values for role, side in sides.items() if side.captures},
        pythons={role: one.python for role, one in launched.items()},
        pids={role: [one.pid, *one.workers] for role, one in launched.items()},
        free={role: side.free.generations for role, side in sides.items() if side.free is not None},
        replay={role: side.replay.generations for role, side in sides.items() if side.replay is not None},
    )


def ground_of_manifests(manifests: Mapping[str, Mapping[str, Any]]) -> Ground:
    """Two recordings. What their manifests do not say stays unknown."""
    reference = manifests.get("reference", {})
    specs = {role: _mapping(content.get("spec")) for role, content in manifests.items()}
    flags = [bool(content["simulated"]) for content in manifests.values() if "simulated" in content]
    return Ground(
        source="compare",
        case=_or_none(lambda: parse_case(json.dumps(reference["case"]), "the recording's case")),
        info=_or_none(lambda: model_info_of(reference)),
        engines={role: str(content["engine"]) for role, content in manifests.items() if content.get("engine")},
        device=next((str(spec["device"]) for spec in specs.values() if spec.get("device")), None),
        simulated=any(flags) if flags else None,
        versions={role: found for role, content in manifests.items() if (found := _versions(content))},
        extras={
            role: SideExtras(_mapping(spec.get("options")), _texts(spec.get("patches"))) for role, spec in specs.items()
        },
        audits={
            role: [one for one in content["weights"] if isinstance(one, Mapping)]
            for role, content in manifests.items()
            if isinstance(content.get("weights"), list) and content["weights"]
        },
        values={role: _texts(_mapping(content.get("capture")).get("values")) for role, content in manifests.items()},
        free=_generations(manifests, FREE),
        replay=_generations(manifests, REPLAY),
    )


def _generations(manifests: Mapping[str, Mapping[str, Any]], run: str) -> dict[str, Sequence[Generation]]:
    found: dict[str, Sequence[Generation]] = {}
    for role, content in manifests.items():
        try:
            found[role] = generations_of(content, run) or ()
        except (KeyError, TypeError, ValueError):  # as in _or_none
            continue
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    """A manifest is a file that anybody may have edited: what is no mapping says nothing."""
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _versions(content: Mapping[str, Any]) -> dict[str, str]:
    found = {str(name): str(version) for name, version in _mapping(content.get("versions")).items()}
    return {**found, "python": str(content["python"])} if content.get("python") else found


def _or_none(make: Callable[[], T]) -> T | None:
    """What a recording says, or that it does not say it (whatever is wrong with it was reported elsewhere)."""
    try:
        return make()
    except (UserError, KeyError, TypeError, ValueError):
        return None
