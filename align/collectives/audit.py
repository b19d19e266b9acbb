"""The audit of recorded collectives of one side: by relation, by order, and what is told of both.

Collectives of all forwards of a launch are judged, dummies too: a wrong one is wrong whoever asked for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from align.checkpoints.table import parse
from align.collectives.begin import call_about, way_of
from align.collectives.order import order_finding
from align.collectives.record.mismatch import Mismatch
from align.collectives.record.types import OPERATIONS, CollectiveCall
from align.collectives.relations import Judged, Key, judge_call, together
from align.collectives.sequences import Group, mismatches, stands_before, under_way
from align.findings import Finding, told
from align.sentences import said, text_of

#: Why there is nothing to audit.
NO_RECORDS = "no collective was recorded"
#: How many calls and names a finding lists.
_LISTED = 8
_END = (1 << 31, 0)


@dataclass(frozen=True)
class Row:
    """The collectives of one operation in one group.

    Attributes:
        operation: one of :data:`align.collectives.record.types.OPERATIONS`.
        group: global ranks.
        right, wrong, unseen: how many were judged so; of the last nobody knows.
        ranks: whose results were wrong.
    """

    operation: str
    group: tuple[int, ...]
    right: int = 0
    wrong: int = 0
    unseen: int = 0
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "operation": self.operation,
            "group": list(self.group),
            "right": self.right,
            "wrong": self.wrong,
            "unseen": self.unseen,
            "ranks": list(self.ranks),
        }


@dataclass(frozen=True)
class Audited:
    """The collectives of one side.

    Attributes:
        observable: whether any were recorded.
        records: how many calls of ranks were.
        rows: by operation and group, of the runs whose tensors were kept.
        wrong: those whose relation does not hold.
        mismatches: where the ranks of a group part.
        unseen: what could not be judged, and why; never a pass.
        bytes: of the records.
        calls: all records, by rank.
    """

    observable: bool
    records: int = 0
    rows: tuple[Row, ...] = ()
    wrong: tuple[Judged, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    unseen: tuple[str, ...] = ()
    bytes: int = 0
    calls: Mapping[int, Sequence[CollectiveCall]] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """How many were seen to be right or wrong."""
        return sum(row.right + row.wrong for row in self.rows)

    @property
    def faults(self) -> int:
        """Wrong ones, and groups whose ranks part."""
        return len(self.wrong) + len(self.mismatches)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "observable": self.observable,
            "records": self.records,
            "rows": [row.to_dict() for row in self.rows],
            "faults": self.faults,
            "unseen": list(self.unseen),
            "bytes": self.bytes,
        }

    def findings(self, side: str) -> list[Finding]:
        """Path C: one finding for each group that parts, and one for each operation and checkpoint that is wrong."""
        groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
        for one in self.wrong:
            groups[one.operation, _where(one.calls)].append(one)
        found = [order_finding(one, side) for one in self.mismatches]
        return found + [_of_relation(side, group) for group in groups.values()]


def not_audited(why: str) -> Audited:
    """A side whose collectives nobody looked at."""
    return Audited(False, unseen=(why,))


def audit_calls(
    records: Mapping[int, Sequence[CollectiveCall]],
    notes: Sequence[str] = (),
    size: int = 0,
    recorded: Collection[int] | None = None,
) -> Audited:
    """Audit the calls of all ranks.

    Args:
        records: by rank, each in its own order.
        notes: what could not be recorded.
        size: bytes of the records.
        recorded: numbers of the runs whose tensors were to be kept; ``None`` for all. Of the others the order counts.
    """
    count = sum(map(len, records.values()))
    if not count:
        return replace(not_audited(NO_RECORDS), unseen=(NO_RECORDS, *notes))
    apart = mismatches(records)
    rows: dict[tuple[str, tuple[int, ...]], Counter[str]] = defaultdict(Counter)
    ranks: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    reasons: Counter[str] = Counter()
    wrong = []
    paired = together(records)
    cut = under_way(paired)
    for key, calls in paired.items():
        if key in cut:
            continue
        one = _judged(key, calls, apart)
        kept = recorded is None or any(call.values or call.place.generation in recorded for call in calls.values())
        if one.verdict == "not observable" and stands_before(apart, next(iter(calls.values()))) and not kept:
            continue
        about = one.operation, key.group
        rows[about][one.verdict] += 1
        ranks[about] |= set(one.ranks)
        if one.verdict == "wrong":
            wrong.append(one)
        elif one.verdict == "not observable" and one.what is not None:
            reasons[f"{one.operation}: {text_of(one.what)}"] += 1
    return Audited(
        observable=True,
        records=count,
        rows=tuple(
            Row(*about, found["right"], found["wrong"], found["not observable"], tuple(sorted(ranks[about])))
            for about, found in sorted(rows.items(), key=lambda item: (OPERATIONS.index(item[0][0]), item[0][1]))
        ),
        wrong=tuple(wrong),
        mismatches=tuple(apart.values()),
        unseen=(*notes, *(f"{why} ({number} of them)" for why, number in reasons.most_common(_LISTED))),
        bytes=size,
        calls=dict(records),
    )  # fmt: skip


def _judged(key: Key, calls: Mapping[int, CollectiveCall], apart: Mapping[Group, Mismatch]) -> Judged:
    first = next(iter(calls.values()))
    if not stands_before(apart, first):
        return Judged(key, first.operation, "not observable", said("relation.after"), (), 0.0, calls)
    return judge_call(key, calls)


# ----------------------------------------------------------------------------------------------------------- findings


def _where(calls: Mapping[int, CollectiveCall]) -> str:
    return next((call.where for call in calls.values() if call.where), "")


def _checkpoint(name: str) -> tuple[str | None, int | None]:
    try:
        parsed = parse(name)
    except ValueError:
        return None, None
    return name, parsed.layer


def call_to_dict(call: CollectiveCall) -> dict[str, Any]:
    """What a finding tells of a call."""
    return {
        "rank": call.rank,
        "operation": call.operation,
        "function": call.function,
        "group": list(call.group),
        "backend": call.backend,
        "dtype": call.dtype,
        "given": [list(shape) for shape in call.given],
        "site": list(call.site),
        "number": call.in_group,
        "step": call.place.step,
        "checkpoint": call.where,
    }


def _of_relation(side: str, group: Sequence[Judged]) -> Finding:
    first = group[0]
    call = next(iter(first.calls.values()))
    checkpoint, layer = _checkpoint(_where(first.calls))
    assert first.what is not None
    what = said(
        "relation.finding",
        operation=first.operation,
        number=first.key.in_group,
        group=list(first.key.group),
        what=first.what,
    )
    evidence = {
        **told(what),
        "operator": first.operation,
        "ratio": max(one.ratio for one in group),
        "collective": call_to_dict(call),
        "wrong": len(group),
        "numbers": [one.key.in_group for one in group][:_LISTED],
    }
    return Finding(
        "C",
        "collective",
        side=side,
        checkpoint=checkpoint,
        layer=layer,
        step=call.place.step if call.place.step >= 0 else None,
        ranks=tuple(sorted({rank for one in group for rank in one.ranks})),
        evidence=evidence,
        next=f"see {first.operation} of the {side} at {call.site[0] if call.site else 'its call'}: its group, its "
        "buffers and its stream",
    )


# ---------------------------------------------------------------------------------------- beside what else was found


def with_records(
    findings: Sequence[Finding], audits: Mapping[str, Audited], groups: Mapping[str, int] | None = None
) -> list[Finding]:
    """Findings with those of the records in their places; one about the same checkpoint is told by the other.

    Path C gets the calls that were recorded at its checkpoint: which function, of which group, from where, how often.

    Args:
        groups: data-parallel groups of a side, one if it is not there; steps of findings are numbered over all of them.
    """
    found = [_with_calls(one, audits.get(str(one.side)), (groups or {}).get(str(one.side), 1)) for one in findings]
    for side, audited in audits.items():
        for one in audited.findings(side):
            if one.kind == "collective" and any(_same(one, other) for other in found):
                continue
            # What only differs between the sides there is explained by it.
            found = [other for other in found if not _explains(one, other)]
            behind = (at for at, other in enumerate(found) if other.path != "INPUT" and _order(other) >= _order(one))
            found.insert(next(behind, len(found)), one)
    return found


def _explains(one: Finding, other: Finding) -> bool:
    unexplained = (other.path, other.kind) == ("B", "unexplained") and other.side in (None, one.side)
    return unexplained and one.checkpoint is not None and other.checkpoint == one.checkpoint


def _same(one: Finding, other: Finding) -> bool:
    return (
        other.path == "C"
        and other.side == one.side
        and other.checkpoint is not None
        and (one.checkpoint is None or _order(other) <= _order(one))
    )


def _order(finding: Finding) -> tuple[int, int]:
    return _END if finding.checkpoint is None else parse(finding.checkpoint).order


def _with_calls(finding: Finding, audited: Audited | None, groups: int) -> Finding:
    if audited is None or not audited.observable or finding.path != "C" or finding.checkpoint is None:
        return finding
    if "collective" in finding.evidence:
        return finding
    parsed = parse(finding.checkpoint)
    here = list(_at(audited, finding.checkpoint))
    others = {
        layer: len(list(_at(audited, parsed.kind.at(layer))))
        for layer in (range(64) if parsed.layer is not None else ())
        if layer != parsed.layer
    }
    counts = sorted({count for count in others.values() if count})
    about: dict[str, Any] = {"calls_here": len(here), "calls_in_other_layers": counts}
    if here:
        way = way_of(finding)
        step = None if finding.step is None else finding.step // groups  # as a rank counts
        meant = here[0] if way is None else call_about(way, here, step)
        about |= {"collective": call_to_dict(meant)} if meant is not None else {}
    elif counts:
        layer = next(layer for layer, count in others.items() if count)
        about["collective_elsewhere"] = call_to_dict(next(_at(audited, parsed.kind.at(layer))))
    return replace(finding, evidence={**finding.evidence, **about})


def _at(audited: Audited, checkpoint: str) -> Iterator[CollectiveCall]:
    """Calls of the first rank at a checkpoint."""
    if audited.calls:
        first = next(iter(audited.calls.values()))
        yield from (call for call in first if checkpoint in call.place.inside and not call.place.dummy)
