"""Where and when a finding shows: its phase, the places to read, and how far it reaches, as claims for the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from align.collectives.routed_sides import SUMMED
from align.findings import WORST_ALONE
from align.result.schema import Result
from align.sentences import Said, is_said, said

#: Key in the words, and what fills its sentence. Values that start with ``@`` are keys themselves.
Claim = tuple[str, dict[str, Any]]
#: Names that a list shows.
_LISTED = 24
#: Numbers and names with a number that follow each other and are told as ``0–7``, from so many on.
_SPAN = 3
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)")


class Told(Protocol):
    """What a finding has, while a run works and in its result."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def checkpoint(self) -> str | None: ...
    @property
    def side(self) -> str | None: ...
    @property
    def phase(self) -> str | None: ...
    @property
    def evidence(self) -> Any: ...


def onset_of(finding: Told) -> str | None:
    """The first stage that is wrong (``prefill``, ``decode 1``, ``decode N``); ``None`` if that is not known."""
    phases = finding.evidence.get("phases")
    onset = phases.get("onset") if isinstance(phases, dict) else None
    return None if onset is None else str(onset)


def phase_of(finding: Told) -> str:
    """Key of the sentence that says in which phase it shows, the same wherever it is said."""
    if finding.kind == "weights":
        return "phase.each"  # both phases read the same weights
    onset = onset_of(finding)
    if onset == "prefill":
        states = finding.evidence["phases"].get("states") or {}
        decode = [states[stage] for stage in ("decode 1", "decode N") if stage in states]
        return "phase.prefill on" if not decode or "beyond" in decode else "phase.prefill alone"
    if onset is not None:
        return f"phase.{onset}"
    shown = (finding.evidence.get("scope") or {}).get("phases") or ()
    phases = finding.evidence.get("phases")
    named: list[str] = list(phases if isinstance(phases, list) else shown)
    if finding.phase is not None:
        return f"phase.{finding.phase}"
    if {"prefill", "decode"} <= set(named):
        return "phase.each"
    return f"phase.{next(iter(named))}" if len(named) == 1 else "phase.unknown"


def begin_at(finding: Told) -> str:
    """``file.py:12 function``, where to begin to read on the accused side; empty if no live place is known."""
    if finding.side is None or finding.kind == "host fallback":  # that names its places itself
        return ""
    entries = (finding.evidence.get("read") or {}).get(finding.side) or ()
    return str(next((one["place"] for one in entries if one.get("place")), ""))


def about_experts(finding: Told) -> str:
    """What the words for a kind have behind it where experts' rows are exchanged."""
    of_rows = finding.path == "C" and str(finding.checkpoint).endswith(f".{SUMMED}")
    return " experts" if of_rows else ""


def is_worst_alone(finding: Told) -> bool:
    """Whether the place that a finding names is the worst one, and not all that show it."""
    return finding.kind in WORST_ALONE


def scope(result: Result) -> list[Claim]:
    """How far it reaches, each of how many that were looked at."""
    return list(_scope(result))


def _scope(result: Result) -> Iterator[Claim]:
    found = result.scope
    if result.tokens is None and result.tensors is None and not result.findings:
        yield "scope.nothing", {}
        return
    requests_of = len(found.requests_of)
    none = "@label.none" if result.verdict == "aligned" else "@label.all_or_unknown"
    yield _counted("scope.origin", _of("layer", found.origin_layers, found.layers_of, none), found.layers_of)
    unknown = "@label.none" if result.tensors else "@label.not_known"
    count = "@label.not_known" if found.checkpoints_beyond is None else found.checkpoints_beyond
    reached = _of("layer", found.reached_layers, found.layers_of, unknown)
    yield "scope.reached", {"found": reached, "count": count}
    if result.findings:
        yield "scope.phase", {"phase": f"@{phase_of(result.findings[0])}"}
    every = "@label.every" if result.findings and result.findings[0].kind == "weights" else none
    yield _counted("scope.requests", _of("request", _requests(result), requests_of, every, bare=True), requests_of)
    steps = steps_of(result)
    if steps is not None:
        yield "scope.steps", {"found": steps}
    yield _counted("scope.ranks", _of("rank", found.ranks, len(found.ranks_of), none), len(found.ranks_of))
    if found.rows_of:
        yield ("scope.rows" if found.rows else "scope.no_row"), {"rows": found.rows, "of": found.rows_of}
    if found.worst is not None:
        where = found.worst
        about = {"request": where.request, "position": where.position, "checkpoint": where.checkpoint or "-"}
        yield "scope.worst", about


def whole(result: Result) -> Said | None:
    """The scope in one line: ``all 3 requests; steps 0–7; layers 0–3``; ``None`` where nothing is known of it."""
    found = result.scope
    layers = found.origin_layers or found.reached_layers
    requests = list(found.requests_of) if _is_weights(result) else _requests(result)
    parts = [
        _of("request", requests, len(found.requests_of), None),
        steps_of(result),
        _of("layer", layers, found.layers_of, None),
        _of("rank", found.ranks, len(found.ranks_of), None) if len(found.ranks_of) > 1 else None,
    ]
    told = [one for one in parts if one is not None]
    return said("list.semicolon", parts=told) if result.findings and told else None


def _requests(result: Result) -> list[str]:
    """Those that show it, in the order of those that were compared."""
    order = {name: at for at, name in enumerate(result.scope.requests_of)}
    return sorted(result.scope.requests, key=lambda name: order.get(name, len(order)))


def _is_weights(result: Result) -> bool:
    """Weights are read by all requests alike."""
    return bool(result.findings) and result.findings[0].kind == "weights"


def steps_of(result: Result) -> Said | None:
    """Engine steps in which the headline shows, where each of them was looked at; ``None`` where that is not known."""
    if not result.findings:
        return None
    first = result.findings[0]
    found = list((first.evidence.get("scope") or {}).get("steps") or ())
    recorded = result.recordings.get(first.side or "")
    same_run = first.evidence.get("run") == first.evidence.get("recorded_run")
    # A recording counts the steps of all ranks together.
    total = recorded.steps if recorded is not None and len(recorded.ranks) == 1 and same_run else None
    return _of("step", found, total, None) if found else None


def _of(what: str, found: Sequence[Any], total: int | None, otherwise: str | None, bare: bool = False) -> Any:
    """``all 4 layers``, ``layers 1–3``, ``layer 0``; a number alone would read as a count, ``bare`` names would not."""
    if not found:
        return otherwise
    if total is not None and total > 1 and len(set(found)) == total:
        return said(f"reach.every_{what}", count=total)
    if bare:
        return said("reach.list", parts=cut(found))
    return said(f"reach.{what}{'' if len(found) == 1 else 's'}", parts=cut(found))


def cut(found: Sequence[Any], limit: int = _LISTED) -> list[str]:
    """A list as text in whole ranges, and how many there are where that is still more than the limit."""
    parts = spans(found)
    return [*parts[:limit], *([f"… ({len(found)})"] if len(parts) > limit else [])]


def spans(found: Sequence[Any]) -> list[str]:
    """``0–3``, ``7`` of 0, 1, 2, 3, 7; ``r0–r2`` of names that are alike but for a number. The order stays."""
    told: list[str] = []
    run: list[str] = []
    for name in map(str, found):
        if run and not _follows(run[-1], name):
            told += _span(run)
            run = []
        run.append(name)
    return [*told, *_span(run)]


def _follows(one: str, other: str) -> bool:
    first, second = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    return first is not None and second is not None and (first[1], int(first[2]) + 1) == (second[1], int(second[2]))


def _span(run: Sequence[str]) -> list[str]:
    return [f"{run[0]}–{run[-1]}"] if len(run) >= _SPAN else list(run)


def _counted(key: str, found: Any, every: int | None) -> Claim:
    """With how many there are, where somebody counted and it is not said already."""
    counted = is_said(found) and str(found["say"]).startswith("reach.every_")
    return (f"{key} of", {"found": found, "of": every}) if every and not counted else (key, {"found": found})
