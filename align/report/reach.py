"""Where and when a finding shows: its phase, the places to read, and how far it reaches, as claims for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from align.collectives.routed_sides import SUMMED
from align.findings import WORST_ALONE
from align.result.schema import Result
from align.sentences import said

#: Key in the words, and what fills its sentence. Values that start with ``@`` are keys themselves.
Claim = tuple[str, dict[str, Any]]
#: Names that a list shows.
_LISTED = 24


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
    none = "@label.none" if result.verdict == "aligned" else "@label.all_or_unknown"
    yield _counted("scope.origin", _numbered("layer", found.origin_layers, none), found.layers_of)
    unknown = "@label.none" if result.tensors else "@label.not_known"
    count = "@label.not_known" if found.checkpoints_beyond is None else found.checkpoints_beyond
    yield "scope.reached", {"found": _numbered("layer", found.reached_layers, unknown), "count": count}
    if result.findings:
        yield "scope.phase", {"phase": f"@{phase_of(result.findings[0])}"}
    every = "@label.every" if result.findings and result.findings[0].kind == "weights" else none
    yield _counted("scope.requests", _of(found.requests, found.requests_of, every), len(found.requests_of))
    yield _counted("scope.ranks", _numbered("rank", found.ranks, none), len(found.ranks_of))
    if found.rows_of:
        yield ("scope.rows" if found.rows else "scope.no_row"), {"rows": found.rows, "of": found.rows_of}
    if found.worst is not None:
        where = found.worst
        about = {"request": where.request, "position": where.position, "checkpoint": where.checkpoint or "-"}
        yield "scope.worst", about


def _of(found: Sequence[Any], every: Sequence[Any] | None, otherwise: str) -> Any:
    if not found:
        return otherwise
    return "@label.every" if every and len(found) == len(every) > 1 else said("reach.list", parts=cut(found))


def cut(found: Sequence[Any], limit: int = _LISTED) -> list[str]:
    """The first of a list as text, and how many there are if that is more."""
    return [*map(str, found[:limit]), *([f"… ({len(found)})"] if len(found) > limit else [])]


def _numbered(what: str, found: Sequence[int], otherwise: str) -> Any:
    """``rank 0`` or ``layers 1, 2``: a number alone would read as a count."""
    return said(f"reach.{what}{'' if len(found) == 1 else 's'}", parts=cut(found)) if found else otherwise


def _counted(key: str, found: Any, every: int | None) -> Claim:
    """With how many there are, where somebody counted."""
    return (f"{key} of", {"found": found, "of": every}) if every else (key, {"found": found})
