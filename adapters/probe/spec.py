"""The spec that the driver's side writes and every worker reads: which run this is, and what to force.

One JSON file per side, replaced atomically and numbered by a generation. Workers look at it before each step, so a new
run needs no new launch. A request is known to its engine by a key of the engine's own kind (a session number, an id).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FILE = "spec.json"


@dataclass(frozen=True)
class RequestSpec:
    """One request of a run.

    Attributes:
        name: identity in records.
        prompt_len: in tokens.
        forced: ids to force, one per generated token.
        arrival, dp_rank, stop_ids: as in :class:`adapters.base.Request`.
    """

    name: str
    prompt_len: int
    max_new_tokens: int
    forced: tuple[int, ...] | None = None
    arrival: int = 0
    dp_rank: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransplantSpec:
    """Tensors of the other side that take the place of this side's own in one run.

    Attributes:
        directory: holds the tensors, see :mod:`adapters.probe.transplant`; every rank says there what it replaced.
        checkpoints: names of what is replaced.
    """

    directory: str
    checkpoints: tuple[str, ...]


@dataclass(frozen=True)
class CaptureSpec:
    """What the workers record of one run.

    Attributes:
        directory: the side's trace directory; every rank writes below it.
        values: patterns (``fnmatch``) of checkpoint names whose values are kept; ``("*",)`` keeps all.
        digest: random projections of every checkpoint.
        residual: recompute every operator in float32 and keep statistics of the error that it added.
        sample_rows: rows per step that the residual recomputes at most.
        lean: keep digests of a few rows only, and of the residual's sums the worst (:mod:`adapters.probe.lean`).
        seed: of the projections and the sampling.
        transplant: what is replaced before it is recorded, and before anything reads it.
        routing: expert ids of the other side that routers use instead of their own (:mod:`adapters.probe.routing`).
    """

    directory: str
    values: tuple[str, ...] = ("*",)
    digest: bool = True
    residual: bool = True
    sample_rows: int = 64
    lean: bool = False
    seed: int = 0
    transplant: TransplantSpec | None = None
    routing: TransplantSpec | None = None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CaptureSpec:
        """The inverse of :func:`dataclasses.asdict`, also of its JSON."""
        given = {name: _transplant(plain.get(name)) for name in ("transplant", "routing")}
        return cls(**{**plain, "values": tuple(plain["values"]), **given})


def _transplant(plain: Mapping[str, Any] | None) -> TransplantSpec | None:
    return None if plain is None else TransplantSpec(plain["directory"], tuple(plain["checkpoints"]))


@dataclass(frozen=True)
class ProbeSpec:
    """One run: ``generation`` counts runs of this launch from 1; ``top_k`` logprobs are recorded per token.

    ``patches`` are files that take the place of those that were applied before; ``None`` leaves these.
    """

    generation: int
    top_k: int
    requests: dict[str, RequestSpec] = field(default_factory=dict)
    capture: CaptureSpec | None = None
    patches: tuple[str, ...] | None = None


def write_spec(directory: Path, spec: ProbeSpec) -> None:
    """Replace the spec atomically: a worker sees the old one or the new one.

    The hosts of a side's data-parallel groups share the directory; each writes the same.
    """
    temporary = directory / f"{_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    os.replace(temporary, directory / _FILE)


class SpecReader:
    """Reads the spec when its file changed; cheap enough for every step."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._stamp: tuple[int, int] | None = None
        self._spec: ProbeSpec | None = None

    def read(self) -> ProbeSpec | None:
        """The current spec, or ``None`` while there is none (warm-up, profiling)."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            requests = {
                key: RequestSpec(
                    name=value["name"],
                    prompt_len=value["prompt_len"],
                    max_new_tokens=value["max_new_tokens"],
                    forced=None if value["forced"] is None else tuple(value["forced"]),
                    arrival=value["arrival"],
                    dp_rank=value["dp_rank"],
                    stop_ids=tuple(value["stop_ids"]),
                )
                for key, value in raw["requests"].items()
            }
            capture = raw.get("capture")
            if capture is not None:
                capture = CaptureSpec.from_dict(capture)
            patches = raw.get("patches")
            self._spec = ProbeSpec(
                raw["generation"], raw["top_k"], requests, capture, None if patches is None else tuple(patches)
            )
            self._stamp = stamp
        return self._spec
