"""The audit of collectives among the stages of a run: its records are kept in the trace and judged from there, and
ranks that part while an engine runs end the run with a finding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from align.collectives.audit import NO_RECORDS, Audited, audit_calls, not_audited
from align.collectives.order import order_finding
from align.collectives.record.files import FOLDER, read_records
from align.collectives.record.mismatch import Mismatch
from align.collectives.record.types import CollectiveCall
from align.compare.rows import Recorded
from align.errors import SideError
from align.findings import Finding
from align.run.audit import recorded_as
from align.run.records import copy_records
from align.sentences import raw, said


class RanksPart(SideError):  # noqa: N818 - the ranks do
    """Ranks of a side do not make the same collective, so it was ended: a finding, although the run is not complete.

    Args:
        method: what the side was asked for.
    """

    def __init__(self, side: str, engine: str, method: str, mismatch: Mismatch) -> None:
        self.finding: Finding = order_finding(mismatch, side)
        what = raw(self.finding.summary)
        super().__init__(
            side,
            f"the {side} ({engine}) was stopped during {method}: {self.finding.summary}",
            self.finding.next,
            told=said("stopped.side", side=side, engine=engine, what=said("stopped.parted", method=method, what=what)),
        )


def keep_calls(work_dir: Path, trace: Path) -> None:
    """Copy what the workers of a side recorded of all runs so far into a trace, see :func:`copy_records`.

    Raises:
        UserError: the disk is full or not writable.
    """
    copy_records(work_dir / FOLDER, trace / FOLDER)


def audit_collectives(traces: Mapping[str, Recorded], everywhere: bool = True) -> dict[str, Audited]:
    """What the records beside the traces say, by role.

    A side with one rank has none, and is left out. So is one without records whose groups have one rank each: an engine
    may run such groups as if there were no others.

    ``everywhere``: of all runs of the launch, and not of the recorded one alone.
    Whatever is wrong with the records themselves is told and raises nothing.
    """
    found = {}
    for role, trace in traces.items():
        alone = int((trace.manifest.get("layout") or {}).get("tp", 1)) == 1 and not (trace.directory / FOLDER).is_dir()
        if len(trace.ranks) > 1 and not alone:
            found[role] = _audited(trace, everywhere)
    return found


def _audited(trace: Recorded, everywhere: bool) -> Audited:
    try:
        records = read_records(trace.directory / FOLDER)
        if records is None:
            return not_audited(NO_RECORDS)
        by_rank: dict[int, list[CollectiveCall]] = {rank: [] for rank in records.ranks}
        mine = {number for number, name in records.recordings.items() if name == recorded_as(trace)}
        for call in records.calls:
            if everywhere or call.place.generation in mine:
                by_rank[call.rank].append(call)
        return audit_calls(by_rank, records.notes, records.bytes, mine or None)
    except Exception as error:  # whatever a worker wrote: one bad record must not abort a comparison
        return not_audited(f"the records cannot be read: {type(error).__name__}: {error}")
