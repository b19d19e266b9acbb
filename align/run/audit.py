"""The audit of the cache's indices among the stages of a run: its records are kept in the trace and audited from there.

So a joint run, ``align compare`` and a request alone judge the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from align.compare.indices import explains
from align.compare.rows import Recorded
from align.findings import Finding
from align.ledger.record.files import FOLDER
from align.ledger.sides import Audited, audit_folder
from align.run.records import copy_records
from align.run.stability import Stability


def keep_records(work_dir: Path, trace: Path) -> None:
    """Copy what the workers of a side recorded of all runs so far into a trace, see :func:`copy_records`.

    Raises:
        UserError: the disk is full or not writable.
    """
    copy_records(work_dir / FOLDER, trace / FOLDER)


def keep_and_audit(work_dirs: Mapping[str, Path], traces: Mapping[str, Path]) -> dict[str, Audited]:
    """The same by role, and what the audit of each copy finds."""
    for role, trace in traces.items():
        keep_records(work_dirs[role], trace)
    return {role: audit_folder(trace / FOLDER, trace.name) for role, trace in traces.items()}


def audit_recordings(traces: Mapping[str, Recorded]) -> dict[str, Audited]:
    """What the audits of recordings find, wherever these were moved to since."""
    return {role: audit_folder(one.directory / FOLDER, recorded_as(one)) for role, one in traces.items()}


def recorded_as(trace: Recorded) -> str:
    """Name of the directory that a trace was recorded in, wherever it was moved to since."""
    capture: Any = trace.manifest.get("capture")
    directory = capture.get("directory") if isinstance(capture, Mapping) else None
    return Path(str(directory)).name if directory else trace.directory.name


def index_faults(ledgers: Mapping[str, Audited], everywhere: bool = True) -> list[Finding]:
    """Path A of both sides; ``everywhere``: also what other runs of the launch alone show."""
    return [finding for role, one in ledgers.items() for finding in one.findings(role, everywhere)]


def audit_unstable(
    results: Sequence[Stability], directories: Mapping[str, Path]
) -> tuple[dict[str, Audited], list[Finding]]:
    """What the indices of sides that do not repeat themselves say of it.

    Returns:
        The audits, and the findings if one of them harms what attention reads; otherwise none explains anything.
    """
    roles = [one.side for one in results if not one.stable]
    ledgers = {role: audit_folder(directories[role] / FOLDER, "") for role in roles}
    found = index_faults(ledgers)
    harm = any(wrong.reach for one in ledgers.values() for wrong in one.wrongs)
    return ledgers, sorted(found, key=lambda one: not explains(one)) if harm else []
