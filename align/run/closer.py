"""The second look: the request that shows the headline runs by itself, with the values that tell more."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from adapters.base import Generation, RunResult
from adapters.probe.spec import CaptureSpec, TransplantSpec
from align.case.schema import Case
from align.compare.tensors import TensorComparison
from align.errors import UserError
from align.findings import Finding
from align.models.info import ModelInfo
from align.run.audit import audit_recordings, index_faults, keep_records
from align.run.collectives import audit_collectives, keep_calls
from align.run.complete import require_rows
from align.run.judge import judge_tensors
from align.run.manifest import manifest, write_manifest
from align.run.outcome import SideOutcome
from align.run.session import Session
from align.run.stability import Stability
from align.run.traces import open_trace, trace_bytes
from align.walk.alone import Alone, same_place
from align.walk.planner import Look

#: Directories of traces inside a side's: of a request alone, and of two requests.
CLOSER, PAIR = "closer", "pair"


def record_alone(
    session: Session,
    case: Case,
    info: ModelInfo,
    look: Look,
    headline: Finding | None,
    *,
    place: str = CLOSER,
    along: tuple[Generation, ...] | None,
    policy: Literal["derived", "seed"],
    floor: str,
    lean: bool = False,
    routing: TransplantSpec | None = None,
    checkpoint_files: Mapping[str, str],
    stable: Mapping[str, Stability],
    say: Callable[[str], None],
) -> Alone:
    """Record and compare one request by itself, or some without the others; ``lean``: as little as float64 needs.

    Args:
        place: name of the trace's directory inside a side's; an earlier trace there is replaced.
        routing: experts that the candidate uses instead of its own choice.

    Raises:
        UserError: a side failed, or its recording cannot be read.
    """
    directories = {role: session.directories[role] / place for role in session.roles}
    for directory in directories.values():
        shutil.rmtree(directory, ignore_errors=True)
    captures = {
        role: CaptureSpec(
            str(directory.absolute()),
            values=look.values,
            lean=lean,
            routing=routing if role == "candidate" else None,
        )
        for role, directory in directories.items()
    }
    results = session.replay_some(look.requests, along, captures)
    part = case.only(look.requests)
    for role, directory in directories.items():
        side = session.outcome.sides[role]
        own = replace(
            side,
            free=_some(side, "free", look.requests),
            again=_some(side, "again", look.requests),
            replay=results[role],
            captures=[captures[role]],
        )
        content = manifest(
            role, part, info, own, work_dir=session.directories[role], checkpoint_files=checkpoint_files,
            stable=stable[role], look=2,
        )  # fmt: skip
        keep_records(session.directories[role], directory)
        keep_calls(session.directories[role], directory)
        write_manifest(directory, content)
    return judge_alone(directories, look, headline, policy, floor, say)


def judge_alone(
    directories: Mapping[str, Path],
    look: Look,
    headline: Finding | None,
    policy: Literal["derived", "seed"],
    floor: str,
    say: Callable[[str], None] = lambda where: None,
) -> Alone:
    """Compare what was recorded of one request by itself.

    Raises:
        UserError: a recording is not whole.
    """
    tensors, findings = _compare(directories, policy, floor, say)
    return Alone(
        request=look.requests[0],
        checkpoint=look.checkpoint,
        reproduced=same_place(look.checkpoint, headline, tensors, findings),
        found=None if not findings else findings[0].summary,
        values=look.values,
        bytes={role: trace_bytes(directory) for role, directory in directories.items()},
        verified=_verified(look, tensors),
    )


def _some(side: SideOutcome, name: Literal["free", "again"], requests: Sequence[str]) -> RunResult | None:
    result: RunResult | None = getattr(side, name)
    if result is None:
        return None
    return replace(result, generations=tuple(one for one in result.generations if one.request in requests))


def _compare(
    directories: Mapping[str, Path], policy: Literal["derived", "seed"], floor: str, say: Callable[[str], None]
) -> tuple[TensorComparison, tuple[Finding, ...]]:
    with ExitStack() as stack:
        traces = {role: stack.enter_context(closing(open_trace(path))) for role, path in directories.items()}
        for role, trace in traces.items():
            try:
                require_rows(role, trace)
            except ValueError as error:
                raise UserError(
                    f"the recording of one request alone cannot be read: {error}", "run it again"
                ) from error
        # What the batch did before is told by the batch's own recording.
        ledger = index_faults(audit_recordings(traces), everywhere=False)
        calls = audit_collectives(traces, everywhere=False)
        return judge_tensors(traces["candidate"], traces["reference"], policy, {}, say, floor, ledger, calls)


def _verified(look: Look, tensors: TensorComparison) -> dict[int, str]:
    """What the same checkpoint says in the layers that were kept beside the accused one."""
    found = {}
    for layer in look.verified:
        name = f"layers.{layer}.{look.checkpoint.split('.', 2)[2]}"
        one = tensors.get(name)
        added = {} if one is None else {side: about.verdict for side, about in one.added.items()}
        beyond = [side for side, verdict in added.items() if verdict == "beyond"]
        found[layer] = "not observable" if one is None else f"beyond by the {beyond[0]}" if beyond else one.verdict
    return found
