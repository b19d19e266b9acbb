"""The manifest of a trace: everything about a side that its workers do not know, in one JSON file beside their records.

With it a trace can be judged anywhere and at any time: what was run, what was read back, which tokens came out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.base import Generation, Observation, TokenStep
from adapters.probe.weights import read_audits
from align.case.schema import Case
from align.compare.host import WARNINGS
from align.models.info import ModelInfo
from align.run.directory import disk_error
from align.run.fallbacks import read_fallbacks
from align.run.outcome import SideOutcome
from align.run.stability import Stability
from align.trace.format import MANIFEST, SCHEMA

#: Runs of a side that a manifest may hold.
FREE, AGAIN, REPLAY = "free", "again", "replay"


def manifest(
    role: str,
    case: Case,
    info: ModelInfo,
    side: SideOutcome,
    *,
    work_dir: Path,
    checkpoint_files: Mapping[str, str],
    stable: Stability | None = None,
    conditions: Sequence[Mapping[str, Any]] = (),
    look: int = 1,
) -> dict[str, Any]:
    """The manifest of one side, JSON-able.

    Args:
        work_dir: the side's directory, where its workers left the audit of the weights.
        checkpoint_files: SHA-256 by file name.
        stable: whether the side repeats itself.
        conditions: as they were judged in this run, with both sides; empty if the side ran alone.
        look: 2 if this is the recording that also kept the values of what was accused by the first.
    """
    assert side.launched is not None and side.spec is not None, "a side that never started has no trace"
    own = case.at(role)
    runs = {FREE: side.free, AGAIN: side.again, REPLAY: side.replay}
    return {
        "schema": SCHEMA,
        "side": role,
        "engine": side.engine,
        "dtype": case.dtype,
        "model": dict(info.config),
        "model_name": info.name,
        "model_info": {**asdict(info), "path": str(info.path), "config": None},
        "layout": own.layout.model_dump(),
        "versions": dict(side.launched.versions),
        "python": side.launched.python_version,
        "simulated": side.launched.simulated,
        "case": case.model_dump(mode="json"),
        "requests": [
            {
                "name": one.name,
                "prompt_len": len(one.token_ids),
                "token_ids": list(one.token_ids),
                **({"dp_rank": one.dp_rank} if own.layout.dp > 1 else {}),
            }
            for one in own.requests
        ],
        "spec": asdict(side.spec),
        "launched": asdict(side.launched),
        "look": look,
        "capture": asdict(side.captures[-1]) if side.captures else None,
        "checkpoint_files": dict(checkpoint_files),
        "observations": [asdict(one) for one in side.observations],
        "conditions": [dict(one) for one in conditions],
        "stability": None if stable is None else stable.to_dict(),
        "generations": {
            name: [asdict(one) for one in result.generations] for name, result in runs.items() if result is not None
        },
        "weights": [dict(one) for one in read_audits(work_dir)],
        WARNINGS: read_fallbacks(work_dir),
    }


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest whole or not at all.

    Raises:
        UserError: the disk is full or not writable.
    """
    target = directory / MANIFEST
    temporary = target.with_name(f"{MANIFEST}.tmp")
    try:
        temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise disk_error(error, target) from error


def generations_of(content: Mapping[str, Any], name: str) -> tuple[Generation, ...] | None:
    """One of a manifest's runs; ``None`` if it is not there.

    Raises:
        ValueError: it is malformed.
    """
    rows = content["generations"].get(name)
    return tuple(map(generation_of, rows)) if rows else None


def generation_of(plain: Mapping[str, Any]) -> Generation:
    """The inverse of :func:`dataclasses.asdict`.

    Raises:
        ValueError: it is malformed.
    """
    try:
        steps = tuple(
            TokenStep(
                chosen=step["chosen"],
                greedy=step["greedy"],
                top=tuple((token, logprob) for token, logprob in step["top"]),
                peak=step.get("peak", 0.0),
            )
            for step in plain["steps"]
        )
        return Generation(plain["request"], steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a generation in {MANIFEST} is malformed: {type(error).__name__}: {error}") from error


def model_info_of(content: Mapping[str, Any]) -> ModelInfo:
    """The model as it was on the machine that recorded.

    Raises:
        ValueError: it is malformed.
    """
    try:
        plain = dict(content["model_info"])
        path, eos = Path(plain.pop("path")), tuple(plain.pop("eos_ids"))
        return ModelInfo(**{**plain, "path": path, "eos_ids": eos, "config": content["model"]})
    except (KeyError, TypeError) as error:
        raise ValueError(f"model_info in {MANIFEST} is malformed: {error}") from error


def observations_of(content: Mapping[str, Any]) -> list[Observation]:
    """What was read back from the live engine."""
    return [Observation(**one) for one in content.get("observations", ())]


def same_prompts(contents: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the traces ran the same requests: names and token ids."""
    seen = [{one["name"]: tuple(one["token_ids"]) for one in content["requests"]} for content in contents]
    return all(one == seen[0] for one in seen)


def requests_of(content: Mapping[str, Any]) -> list[str]:
    """Names of the requests that were recorded."""
    return [str(one["name"]) for one in content["requests"]]
