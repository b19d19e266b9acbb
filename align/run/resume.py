"""What an interrupted run left, and the verdict where its recordings are whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapters.base import SIDES, EngineSpec
from adapters.host import Launched
from adapters.probe.spec import CaptureSpec
from align.calibrate.choose import NONE
from align.case.schema import parse_case
from align.errors import UserError
from align.run.closer import CLOSER, judge_alone
from align.run.complete import require_rows
from align.run.manifest import observations_of, requests_of
from align.run.offline import Compared, Offline
from align.run.outcome import Outcome, SideOutcome
from align.run.recording import rows_by_request
from align.run.report import Report
from align.run.traces import TRACE, open_trace
from align.trace.format import MANIFEST
from align.trace.reader import DamagedFileError
from align.walk.planner import Look, first_look_closer, headline_of, look_after_alone


@dataclass(frozen=True)
class Judged:
    """A verdict without engines.

    Attributes:
        report: as the run's own.
        outcome: the sides, as far as their recordings say.
        compared: what the summary shows; ``None`` where ``error`` stopped the comparison.
    """

    report: Report
    outcome: Outcome
    compared: Compared | None = None
    error: UserError | None = None


def whole_traces(directory: Path) -> tuple[dict[str, Path], str]:
    """The traces of both sides, if every row of both was recorded; otherwise nothing, and the reason."""
    found = {}
    for role in SIDES:
        place = directory / role / TRACE
        if not (place / MANIFEST).is_file():
            return {}, f"the {role} has no whole recording"
        try:
            with closing(open_trace(place)) as trace:
                require_rows(role, trace)
        except (UserError, KeyError, TypeError, ValueError) as error:
            return {}, error.message if isinstance(error, UserError) else f"{place} cannot be read: {error}"
        found[role] = place
    return found, ""


def judge_traces(
    traces: Mapping[str, Path],
    allow: tuple[str, ...],
    policy: Literal["derived", "seed"],
    min_coverage: float,
    progress: Callable[[str], None] | None = None,
    floor: str = NONE,
) -> tuple[Judged | None, str]:
    """Judge whole recordings as the run would have gone on to.

    Returns:
        ``None`` and the reason, where the engines are needed once more: a file is damaged, or what is accused has to
        be recorded with its values.
    """
    offline = Offline(allow, policy, min_coverage, floor)
    error: UserError | None = None
    compared = None
    try:
        compared = offline.run(traces, progress)
    except UserError as stopped:
        if isinstance(stopped.__cause__, DamagedFileError):
            return None, stopped.message
        error = stopped
    if error is None:
        left = look_left(offline, traces, policy, floor)
        if left.look is not None:
            return None, left.why
    outcome = Outcome({role: _side_of(content) for role, content in offline.manifests.items()})
    return Judged(offline.report, outcome, compared, error), ""


@dataclass(frozen=True)
class Left:
    """What is left to record.

    Attributes:
        look: the next recording; ``None`` if nothing is left.
        why: what is missing, in words; empty if nothing is.
    """

    look: Look | None
    why: str = ""


def look_left(
    offline: Offline, traces: Mapping[str, Path], policy: Literal["derived", "seed"], floor: str = NONE
) -> Left:
    """What is left to record after a comparison; a request that was recorded by itself already is taken in.

    Args:
        offline: after its run; its report gets what was found of the request alone.
    """
    report, content = offline.report, offline.manifests["candidate"]
    with closing(open_trace(traces["reference"])) as trace:
        structure = trace.structure
    kept = _capture_of(content).values if content.get("capture") else ()
    look = first_look_closer(
        report.findings,
        report.tensors,
        report.comparisons["replay"],
        requests_of(content),
        structure,
        kept,
        rows_by_request(parse_case(json.dumps(content["case"]), "the trace's case"))
        if _capture_of(content).lean
        else None,
    )
    if look is not None and look.kind == "alone":
        directories = {role: path.with_name(CLOSER) for role, path in traces.items()}
        if not all(_recorded(path) == list(look.requests) for path in directories.values()):
            return Left(look, f"{look.requests[0]} was not recorded by itself yet")
        try:
            headline = headline_of(report.findings, look.checkpoint)
            report.alone = judge_alone(directories, look, headline, policy, floor)
        except UserError as error:
            return Left(look, error.message)
        look = look_after_alone(look, report.alone.reproduced, kept)
    if look is None or content.get("look") == 2:
        return Left(None)
    return Left(look, "the values of what is accused were not recorded yet")


def _recorded(directory: Path) -> list[str] | None:
    """The requests that a directory has a recording of; ``None`` if there is none that can be read."""
    try:
        return requests_of(json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _capture_of(content: Mapping[str, Any]) -> CaptureSpec:
    plain = dict(content["capture"])
    return CaptureSpec(**{**plain, "values": tuple(plain["values"])})


def _rows(content: Mapping[str, Any]) -> dict[str, int] | None:
    """Rows of each request, if the recording is lean."""
    if not _capture_of(content).lean:
        return None
    return rows_by_request(parse_case(json.dumps(content["case"]), "the trace's case"))


def _side_of(content: Mapping[str, Any]) -> SideOutcome:
    """A side as its manifest has it, without its tokens: those are on disk already."""
    launched = dict(content["launched"])
    spec = dict(content["spec"])
    return SideOutcome(
        content["engine"],
        spec=EngineSpec(**{**spec, "patches": tuple(spec["patches"])}),
        launched=Launched(**{**launched, "workers": tuple(launched["workers"])}),
        observations=observations_of(content),
        captures=[_capture_of(content)],
    )


def verdict_on_disk(result: Path) -> dict[str, Any] | None:
    """The ``result.json`` of a run that ended with a verdict; ``None`` if it did not."""
    try:
        content = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ended = isinstance(content, dict) and content.get("verdict") in ("aligned", "diverged")
    return content if ended else None
