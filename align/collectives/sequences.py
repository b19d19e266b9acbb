"""Whether recorded ranks of a group made the same collectives in the same order, and as many.

Workers look for that while they run, see :mod:`align.collectives.record.mismatch`; here it is looked for in records,
wherever these come from. The first place where the sequences part is what counts: nothing behind it belongs together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from align.collectives.record.mismatch import Mismatch, differences
from align.collectives.record.types import CollectiveCall
from align.collectives.relations import Key

Group = tuple[tuple[int, ...], str]


def mismatches(records: Mapping[int, Sequence[CollectiveCall]]) -> dict[Group, Mismatch]:
    """The first mismatch of every group, in order of the groups' first calls.

    A rank that left no record at all is not known to have called nothing; nor is one whose records end before the call
    that it lacks, for records are copied while the engine runs.
    """
    sequences: dict[Group, dict[int, dict[int, CollectiveCall]]] = defaultdict(dict)
    for rank in sorted(records):
        for call in records[rank]:
            sequences[call.group, call.group_name].setdefault(rank, {})[call.in_group] = call
    found = {}
    for group, by_rank in sequences.items():
        ranks = [rank for rank in group[0] if records.get(rank)]
        one = _first({rank: by_rank.get(rank, {}) for rank in ranks}, records)
        if one is not None:
            found[group] = one
    return found


def _first(
    sequences: Mapping[int, Mapping[int, CollectiveCall]], records: Mapping[int, Iterable[CollectiveCall]]
) -> Mismatch | None:
    if len(sequences) < 2:
        return None
    before: CollectiveCall | None = None
    for at in sorted(set().union(*sequences.values())):
        calls = {rank: sequence.get(at) for rank, sequence in sequences.items()}
        made = {rank: call for rank, call in calls.items() if call is not None}
        first, mine = next(iter(made.items()))
        for rank, theirs in calls.items():
            if rank == first:
                continue
            if theirs is None:
                if not mine.place.inside:
                    continue  # ranks wait outside of forwards, each at a step of its own, while records are copied
                later = [call for call in records[rank] if _when(call) > _when(mine)]
                if later:
                    return Mismatch(first, rank, ("count",), mine, None, ended=mine.place, before=before)
            elif differ := differences(mine, theirs):
                return Mismatch(first, rank, differ, mine, theirs, before=before)
        before = mine
    return None


def _when(call: CollectiveCall) -> tuple[int, int]:
    return call.place.generation, call.place.step


def under_way(together: Mapping[Key, Mapping[int, CollectiveCall]]) -> set[Key]:
    """Calls that were being made while the records were copied; they belong to no forward that was asked for.

    Idle groups exchange what they have again and again until the engine ends, and the files of the ranks are copied
    one after the other. So behind a group's last call that came back on every rank there may be some, outside of the
    model's functions, that one rank has begun or ended and another has not. A call inside of the model is never one of
    them, nor is one before which or behind which the group went on.

    Args:
        together: the calls of a group by rank, of all groups, see :func:`align.collectives.relations.together`.
    """
    found: set[Key] = set()
    done: dict[Group, int] = {}
    for key, calls in together.items():
        if all(rank in calls and calls[rank].ended for rank in key.group):
            group = key.group, key.group_name
            done[group] = max(done.get(group, -1), key.in_group)
    for key, calls in together.items():
        last = done.get((key.group, key.group_name))
        if last is None or key.in_group <= last:
            continue
        if not any(call.error or call.place.inside for call in calls.values()):
            found.add(key)
    return found


def stands_before(apart: Mapping[Group, Mismatch], call: CollectiveCall) -> bool:
    """Whether a call stands before the place from which on the calls of its group do not belong together."""
    one = apart.get((call.group, call.group_name))
    return one is None or all(known is None or call.in_group < known.in_group for _, known in one.calls)
