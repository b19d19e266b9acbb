"""The arguments of attention and cache operators among the stages of a run: the workers' records are kept in the trace
and judged from there, and those of a run that broke off from where the workers left them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from align.attention.audit import NO_RECORDS, Audited, audit_side, not_audited
from align.attention.beside import Beside, beside
from align.attention.explain import with_arguments
from align.attention.model import Model, model_of
from align.case.schema import Case
from align.compare.rows import Recorded
from align.errors import SideError, UserError
from align.fa.files import FOLDER, Records, read_records
from align.models.info import ModelInfo
from align.run.records import copy_records
from align.run.report import Report
from align.run.session import Session


def keep_arguments(work_dir: Path, trace: Path) -> None:
    """Copy what the workers of a side recorded of all runs so far into a trace, see :func:`copy_records`.

    Raises:
        UserError: the disk is full or not writable.
    """
    copy_records(work_dir / FOLDER, trace / FOLDER)


def judge_folders(
    folders: Mapping[str, Path], models: Mapping[str, Model], engines: Mapping[str, str]
) -> tuple[dict[str, Audited], tuple[Beside, ...]]:
    """The records of some sides, judged, and those of two beside each other; records that are damaged say so."""
    audits: dict[str, Audited] = {}
    records: dict[str, Records] = {}
    for role, folder in folders.items():
        try:
            found = read_records(folder)
            if found is not None:
                records[role] = found
            audits[role] = not_audited(NO_RECORDS) if found is None else audit_side(found, models[role], engines[role])
        except Exception as error:  # whatever a worker wrote: one bad record must not abort a comparison
            audits[role] = not_audited(f"the records cannot be read: {type(error).__name__}: {error}")
    try:
        return audits, beside(records, models)
    except Exception as error:
        why = f"not set beside each other: {type(error).__name__}: {error}"
        return {role: one.also_unseen(why) for role, one in audits.items()}, ()


def judge_recordings(report: Report, traces: Mapping[str, Recorded]) -> None:
    """The same of recordings, wherever these were moved to since; their findings join the others."""
    manifests = {role: trace.manifest for role, trace in traces.items()}
    _judge(
        report,
        {role: trace.directory / FOLDER for role, trace in traces.items()},
        {role: model_in(content) for role, content in manifests.items()},
        {role: str(content.get("engine", "")) for role, content in manifests.items()},
    )


def model_in(manifest: Mapping[str, Any]) -> Model:
    """What a recording's manifest says of the model and the layout."""
    layout, case = manifest.get("layout") or {}, manifest.get("case") or {}
    return model_of(manifest.get("model") or {}, int(layout.get("tp", 1)), str(case.get("dtype", "")))


def judge_run(report: Report, session: Session, case: Case, info: ModelInfo) -> None:
    """The same of a run whose recordings were not judged: from what the workers left, all of it so far."""
    if report.arguments:
        return
    roles = [role for role in session.roles if session.outcome.sides[role].free is not None or _left(session, role)]
    _judge(
        report,
        {role: session.directories[role] / FOLDER for role in roles},
        {role: model_of(info.config, case.at(role).layout.tp, case.dtype) for role in roles},
        {role: session.outcome.sides[role].engine for role in roles},
    )


def _left(session: Session, role: str) -> bool:
    """Whether the workers of a side left any records; one that never ran leaves none, and says nothing."""
    return (session.directories[role] / FOLDER).is_dir()


def ended_by_arguments(report: Report, session: Session, case: Case, info: ModelInfo, error: UserError) -> bool:
    """Whether a run that an error ended has an attention call that is wrong: that is a finding, and the error is told
    with it. A false condition that stopped the run is an answer of its own; what a run that broke off could not read
    back is none.
    """
    judge_run(report, session, case, info)
    explains = isinstance(error, SideError) or bool(
        report.stability and not all(one.stable for one in report.stability)
    )
    if not explains or any(one.blocks and one.verdict == "false" for one in report.conditions):
        return False
    return any(one.errors for one in report.arguments.values())


def _judge(
    report: Report, folders: Mapping[str, Path], models: Mapping[str, Model], engines: Mapping[str, str]
) -> None:
    report.arguments, report.beside = judge_folders(folders, models, engines)
    report.findings = with_arguments(report.findings, report.arguments)
