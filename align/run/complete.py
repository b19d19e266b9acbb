"""Whether a recording holds all of what its run computed: every rank, and every row of the replay."""

from __future__ import annotations

from align.errors import UserError
from align.run.manifest import REPLAY, generations_of, observations_of
from align.trace.format import STEPS_FILE
from align.trace.reader import Trace

_RECORD = "record that side again: align capture ENGINE --case FILE --out DIR"


def require_ranks(trace: Trace) -> None:
    """Refuse a trace that lacks a rank: what its ranks share would look wrong, and what they split would be missing.

    Raises:
        UserError: names the ranks that are absent.
    """
    absent = trace.absent_ranks
    if absent:
        names = ", ".join(f"rank{rank}" for rank in absent)
        raise UserError(
            f"not comparable: {trace.directory} lacks {names}: its layout has {trace.expected_ranks} ranks, and "
            f"{len(trace.ranks)} left records",
            f"copy the directory whole, or {_RECORD}",
        )


def require_rows(role: str, trace: Trace) -> int:
    """Refuse a trace whose steps do not cover the run that its manifest describes.

    Every prompt position and every generated token but the last is fed to the engine once, on every tensor-parallel
    rank. Prompt positions that a prefix cache supplied are not computed, and need not be there.

    Returns:
        Rows of a look-ahead: an engine that schedules ahead also computes the last token, which nobody asked for.

    Raises:
        UserError: rows are missing; says how many there are, and how many there should be.
        ValueError: the trace cannot be read.
    """
    replay = generations_of(trace.manifest, REPLAY)
    if replay is None:
        return 0  # refused later, where its tokens are needed
    lengths = {one["name"]: int(one["prompt_len"]) for one in trace.manifest["requests"]}
    ends = {one.request: lengths[one.request] + len(one.steps) - 1 for one in replay}
    cached = any(one.name == "prefix_caching" and one.value is True for one in observations_of(trace.manifest))
    wanted = {(name, position) for name, end in ends.items() for position in range(lengths[name] if cached else 0, end)}
    width = int(trace.manifest["layout"]["tp"])
    seen: dict[int, set[tuple[str, int]]] = {}
    for rank in trace.ranks:  # groups of data parallelism serve different requests
        seen.setdefault(rank % width, set()).update(
            (span.request, position)
            for entry in trace.steps(rank)
            if not entry.dummy
            for span in entry.rows
            for position in range(span.start, span.start + span.count)
        )
    for place, rows in seen.items():
        if wanted - rows:
            where = "" if width == 1 else f" on tensor-parallel rank {place}"
            raise UserError(
                f"not comparable: the {role} recorded {len(wanted & rows)} of {len(wanted)} rows{where}: its record "
                f"broke off ({STEPS_FILE} of {trace.directory})",
                _RECORD,
            )
    return sum(position >= ends[request] for request, position in seen[0] if request in ends)
