"""From what the workers of one side recorded to what is wrong with its cache: all runs of a launch, in one audit.

One run of a launch is recorded along with its tensors; the others (the free run and its repetition, a request alone,
transplants) wrote into the same cache before or after it. So all are replayed together, and a request of another run
gets that run's number into its name: ``r0`` is of the recorded run, ``r0 (run 1)`` of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from align.findings import Finding
from align.ledger.explain import findings
from align.ledger.ledger import audit
from align.ledger.looked import Looked
from align.ledger.record.files import Records, read_records
from align.ledger.record.types import IndexRecord
from align.ledger.wrong import Wrong

#: Why there is nothing to audit.
NO_RECORDS = "no index was recorded: by --no-audit or --lean, or by a version that did not record them"


@dataclass(frozen=True)
class Audited:
    """The cache indices of one side.

    Attributes:
        observable: whether indices of the recorded run were looked at.
        recorded: number of the recorded run; 0 if there is none.
        records: that were audited, of all runs and ranks.
        runs: their numbers; 0 is what the engine ran before the first, such as warm-up.
        bytes: of the records.
        wrongs: each fault once.
        unseen: what could not be judged, and why; never a pass.
        groups: data-parallel rank by rank; empty if there is one group.
        looked: how much was judged; ``None`` where nothing was.
    """

    observable: bool
    recorded: int = 0
    records: int = 0
    runs: tuple[int, ...] = ()
    bytes: int = 0
    wrongs: tuple[Wrong, ...] = ()
    unseen: tuple[str, ...] = ()
    groups: Mapping[int, int] = field(default_factory=dict)
    looked: Looked | None = None

    @property
    def faults(self) -> int:
        """How many, over all runs."""
        return len(self.wrongs)

    def findings(self, side: str, everywhere: bool = True) -> list[Finding]:
        """Path A, one finding per kind; ``everywhere``: also kinds that other runs alone show."""
        found = findings(self.wrongs, side, self.recorded, self.groups)
        return [one for one in found if everywhere or not one.evidence["elsewhere"]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; the faults are findings."""
        return {
            "observable": self.observable,
            "records": self.records,
            "runs": list(self.runs),
            "recorded_run": self.recorded,
            "bytes": self.bytes,
            "faults": self.faults,
            "unseen": list(self.unseen),
            "looked": None if self.looked is None else self.looked.to_dict(),
        }


def not_audited(why: str) -> Audited:
    """A side whose indices nobody looked at."""
    return Audited(False, unseen=(why,))


def audit_folder(folder: Path, recording: str) -> Audited:
    """Audit the records in a folder; whatever is wrong with the records themselves is told and raises nothing.

    Args:
        recording: name of the directory of the trace that goes with them; empty for the last run.
    """
    try:
        records = read_records(folder)
    except ValueError as error:
        return not_audited(str(error))
    return not_audited(NO_RECORDS) if records is None else audit_side(records, recording)


def audit_side(records: Records, recording: str) -> Audited:
    """Audit the records of all runs of one launch; see :func:`audit_folder`."""
    runs = sorted({record.run for record in records.records})
    recorded, unseen = _recorded_run(records, recording)
    failures = _failures(records.records)
    if failures:  # whatever was not seen would look like an index that is missing
        known = replace(not_audited(failures[0]), unseen=tuple(failures), recorded=recorded, bytes=records.bytes)
        return replace(known, records=len(records.records), runs=tuple(runs))
    named, tokens = _named(records, recorded)
    try:
        found = audit(named, tokens or None, complete=1 in runs)
    except Exception as error:  # whatever a worker wrote: one bad record must not abort a comparison
        return replace(
            not_audited(f"the records cannot be replayed: {type(error).__name__}: {error}"),
            recorded=recorded, records=len(named), runs=tuple(runs), bytes=records.bytes,
        )  # fmt: skip
    return Audited(
        observable=recorded in runs,
        recorded=recorded,
        records=found.records,
        runs=tuple(runs),
        bytes=records.bytes,
        wrongs=found.wrongs,
        unseen=(
            *unseen,
            *found.unseen,
            *([] if recorded in runs else [f"run {recorded}: no index was recorded of it"]),
        ),
        groups=_groups(records.records),
        looked=found.looked,
    )


def _groups(records: tuple[IndexRecord, ...]) -> dict[int, int]:
    """Data-parallel rank by rank, if any is not of the first group."""
    found = {record.rank: record.dp_rank for record in records}
    return found if any(found.values()) else {}


def _recorded_run(records: Records, recording: str) -> tuple[int, list[str]]:
    """The run that a trace was recorded in: the last one that says so."""
    of_trace = [run.number for run in records.runs if run.recording == recording]
    if recording and of_trace:
        return of_trace[-1], []
    last = max((*(record.run for record in records.records), *(run.number for run in records.runs)), default=0)
    return last, [
        f"which run was recorded: none says that it was {recording}; the last one counts"
    ] if recording else []


def _failures(records: tuple[IndexRecord, ...]) -> list[str]:
    counts = Counter((what, why) for record in records for what, why in record.failures.items())
    return [f"{what}: {why} (in {count} of {len(records)} records)" for (what, why), count in counts.items()]


def _named(records: Records, recorded: int) -> tuple[list[IndexRecord], dict[str, tuple[int, ...]]]:
    """Records and tokens with names of requests that are unique over the runs."""

    def name(request: str, run: int) -> str:
        return request if run == recorded else f"{request} (run {run})"

    named = [
        record
        if record.run == recorded
        else replace(
            record,
            spans=tuple(
                replace(span, request=name(span.request, record.run)) if span.real else span for span in record.spans
            ),
        )
        for record in records.records
    ]
    tokens: Mapping[str, tuple[int, ...]] = {
        name(request, run.number): ids for run in records.runs for request, ids in run.tokens.items()
    }
    return named, dict(tokens)
