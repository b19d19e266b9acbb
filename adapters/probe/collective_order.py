"""Whether the ranks of each group make the same collectives in the same order, looked at before each call is made.

Every rank appends what it is about to do to a file of its own and then reads what its peers have appended. Of two
ranks, the one that comes second sees what the first one does; it then raises instead of making a call that would wait
for ever, or mix up what does not belong together.

A rank that makes one call less makes another one in its place, which differs in the checkpoint it belongs to, or it
ends its forward. So every rank also says how many calls it has made inside the model's functions when a forward ends.
These counts hold for every rank of a group, whether it computes requests or a dummy. Calls outside of the model's
functions are not counted: a background task may make one at any time.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from align.collectives.record.files import Begin, CollectiveWriter, Follower, Group, Mark, rank_file
from align.collectives.record.mismatch import CollectiveMismatch, Mismatch, differences, leave_mismatch
from align.collectives.record.types import CollectiveCall, Place


class _Peer:
    """What another rank has said so far, of the groups that it shares with this one."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._follower = Follower(path)
        #: Number in the group → the call, and its number among those inside the model; until this rank makes its own.
        self.calls: dict[Group, dict[int, tuple[CollectiveCall, int | None]]] = defaultdict(dict)
        self.marks: dict[Group, list[Mark]] = defaultdict(list)
        self._inside: dict[Group, int] = defaultdict(int)

    def update(self) -> None:
        for event in self._follower.news():
            if isinstance(event, Begin):
                call = event.call
                if self._rank not in call.group:
                    continue
                group = (call.group, call.group_name)
                number = self._inside[group] if call.place.inside else None
                self._inside[group] += number is not None
                self.calls[group][call.in_group] = call, number
            elif isinstance(event, Mark):
                self.marks[event.group].append(event)


class Order:
    """Of one rank.

    Args:
        directory: of all ranks' records.
        writer: of this rank's.
    """

    def __init__(self, directory: Path, rank: int, writer: CollectiveWriter) -> None:
        self._directory, self._rank, self._writer = directory, rank, writer
        self._peers: dict[int, _Peer] = {}
        #: Calls inside the model's functions, and how many there were when each forward ended.
        self._inside: dict[Group, int] = defaultdict(int)
        self._marks: dict[Group, list[int]] = defaultdict(list)
        #: The last call of each group.
        self._last: dict[Group, CollectiveCall] = {}

    def check(self, call: CollectiveCall) -> None:
        """A call is about to be made; its line is written.

        Raises:
            CollectiveMismatch: a peer makes another one.
        """
        group = (call.group, call.group_name)
        number = self._inside[group] if call.place.inside else None
        self._inside[group] += number is not None
        for rank in call.group:
            if rank == self._rank:
                continue
            peer = self._updated(rank)
            theirs, _ = peer.calls[group].pop(call.in_group, (None, None))
            if theirs is not None:
                differ = differences(call, theirs)
                if differ:
                    self._raise(Mismatch(self._rank, rank, differ, call, theirs, before=self._last.get(group)))
            elif number is not None:
                done = peer.marks[group][len(self._marks[group]) :]
                if done and done[0].count <= number:
                    before = self._last.get(group)
                    self._raise(Mismatch(self._rank, rank, ("count",), call, None, done[0].place, before))
        self._last[group] = call

    def forward_ended(self, place: Place) -> None:
        """The forward that ran last is over. Does nothing if no group was used inside the model since the one before.

        Raises:
            CollectiveMismatch: a peer makes a call in it that this rank does not make.
        """
        for group, count in self._inside.items():
            marks = self._marks[group]
            if count == (marks[-1] if marks else 0):
                continue
            marks.append(count)
            self._writer.mark(Mark(group, count, place))
            for rank in group[0]:
                if rank == self._rank:
                    continue
                peer = self._updated(rank)
                done = peer.marks[group][len(marks) - 1 :]
                if done and done[0].count <= count:
                    continue  # it has ended this forward, and what it does now belongs to another
                more = (call for call, number in peer.calls[group].values() if number is not None and number >= count)
                theirs = next(more, None)
                if theirs is not None:
                    self._raise(Mismatch(self._rank, rank, ("count",), None, theirs, place, self._last.get(group)))

    def _updated(self, rank: int) -> _Peer:
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer(rank_file(self._directory, rank), self._rank)
        peer.update()
        return peer

    def _raise(self, mismatch: Mismatch) -> None:
        leave_mismatch(self._directory, mismatch)
        raise CollectiveMismatch(mismatch)
