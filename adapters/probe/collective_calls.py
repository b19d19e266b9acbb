"""Records the collectives of one rank: what it gave and got, where it stood, and whether the others make the same call.

Tensors are copied before a call, because most collectives work in place, and after it, or after ``wait()`` of the
handle of one that runs meanwhile. Values are kept in runs that record tensors, up to a number of bytes; in other runs
a call leaves its line alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adapters.probe.callsite import frames
from adapters.probe.collective_order import Order
from adapters.probe.collectives import Asked
from adapters.probe.launch import DP_RANK, probe_dir, read_launch
from adapters.probe.spots import here
from adapters.probe.steplog import process_log
from align.checkpoints.table import parse
from align.collectives.record.files import FOLDER, CollectiveWriter, End, Fresh, Group, Run
from align.collectives.record.mismatch import CollectiveMismatch
from align.collectives.record.types import ALL_TO_ALL, CollectiveCall, Place

#: Bytes of tensors that one rank keeps of one run.
BUDGET_BYTES = 256 << 20
#: Integers up to this many bytes are kept whatever the budget: sizes, ids, flags.
SMALL_BYTES = 64 << 10
#: Frames of a call site: from the function that communicates up to the model's layer.
_DEPTH = 10


def exchanged_in(operation: str, inside: tuple[str, ...]) -> tuple[str, ...]:
    """Tokens are exchanged for the routed experts, also where the engine does so in no function of theirs."""
    if operation != ALL_TO_ALL or not inside:
        return inside
    name = parse(inside[-1])
    return (*inside, f"layers.{name.layer}.moe.routed") if name.kind.name == "moe.out" else inside


@dataclass
class Begun:
    """A call that was begun; ``before`` are copies of what was given, if anything is kept or summed."""

    call: CollectiveCall
    asked: Asked
    before: list[Tensor] | None = None
    ended: bool = False


@dataclass
class _Known:
    """A group of this process: its global ranks and name, and its backend."""

    group: Group
    backend: str
    count: int = 0


class CollectiveRecorder:
    """Of one rank.

    Args:
        directory: of the records.
        rank: global rank.
        first: global rank of what this process takes for rank 0: that of its data-parallel group, where engines of
            such groups know nothing of each other.
    """

    def __init__(self, directory: Path, rank: int, first: int = 0) -> None:
        self._rank, self._first = rank, first
        self._writer = CollectiveWriter(directory, rank)
        self._order = Order(directory, rank, self._writer)
        self._lock = threading.RLock()
        self._groups: dict[Any, _Known | None] = {}
        self._at = 0
        self._generation = 0
        self._left = BUDGET_BYTES
        self._handles: list[Handle] = []
        self._noted: set[str] = set()

    @classmethod
    def of_process(cls) -> CollectiveRecorder | None:
        """Of this rank of the default group; ``None`` if there is one rank only, or if it is not wanted."""
        spec, world = read_launch(), dist.get_world_size()
        if world == 1 or not spec.collectives:
            return None
        alone = spec.dp > 1 and world == spec.tp
        first = int(os.environ.get(DP_RANK, "0")) * spec.tp if alone else 0
        return cls(probe_dir() / FOLDER, first + dist.get_rank(), first)

    # ----------------------------------------------------------------------------------------------------- calls

    def begin(self, asking: Callable[[], Asked]) -> Begun | None:
        """A collective is about to be called; ``None`` if this is not recorded.

        Raises:
            CollectiveMismatch: another rank of the group makes another call.
        """
        try:
            with self._lock:
                return self._begin(asking())
        except CollectiveMismatch:
            raise
        except Exception as error:  # an observer must not stop the engine
            self._note(f"a call was not recorded: {type(error).__name__}: {error}")
            return None

    def _begin(self, asked: Asked) -> Begun | None:
        known = self._known(asked.group)
        if known is None:
            return None
        self._sweep()
        log = process_log()
        if log is not None:
            log.collectives = self
        function = asked.function
        tensor = next(iter((*asked.given, *asked.got)), None)
        begun = Begun(
            CollectiveCall(
                rank=self._rank, at=self._at, in_group=known.count, group=known.group[0], group_name=known.group[1],
                backend=known.backend, operation=function.operation, function=f"torch.distributed.{function.function}",
                dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                given=tuple(tuple(one.shape) for one in asked.given), got=tuple(tuple(one.shape) for one in asked.got),
                place=self._place(function.operation), reduce=asked.reduce,
                root=None if asked.root is None else self._first + asked.root, site=frames(_DEPTH), ended=False,
                sent=asked.sent, received=asked.received, about=asked.about,
            ),
            asked,
        )  # fmt: skip
        if self._recording:
            begun.before = _copies(asked.given)
            begun.call = replace(begun.call, checksum_in=checksum(begun.before))
        self._at += 1
        known.count += 1
        self._writer.begin(begun.call)
        self._order.check(begun.call)
        return begun

    def end(self, begun: Begun, error: str = "", seen: bool = True) -> None:
        """The call came back, or failed with ``error``; what it got is there if it was ``seen`` to end."""
        if begun.ended:
            return
        begun.ended = True
        try:
            with self._lock:
                self._end(begun, error, seen)
        except Exception as failure:  # an observer must not stop the engine
            self._note(f"the end of a call was not recorded: {type(failure).__name__}: {failure}")

    def _end(self, begun: Begun, error: str, seen: bool) -> None:
        at, before = begun.call.at, begun.before
        if before is None or error or not seen:
            why = "" if before is None or error else "nobody waited for it by its handle"
            self._writer.end(End(at, error=error, why=why))
            return
        if begun.asked.group in dist.distributed_c10d._world.pg_coalesce_state:
            self._writer.end(End(at, why="it is run together with others, later"))
            return
        after = _copies(begun.asked.got)
        size = sum(one.numel() * one.element_size() for one in (*before, *after))
        small = size <= SMALL_BYTES and not any(one.is_floating_point() for one in (*before, *after))
        done = End(at, checksum_out=checksum(after))
        if small or size <= self._left:
            self._left -= 0 if small else size
            named = {f"in.{index}": one for index, one in enumerate(before)}
            self._writer.end(done, named | {f"out.{index}": one for index, one in enumerate(after)})
        else:
            why = f"the {BUDGET_BYTES >> 20} MB that a rank keeps of a run are used up"
            self._writer.end(End(at, checksum_out=done.checksum_out, why=why))

    def handle(self, begun: Begun, work: Any) -> Handle:
        """The call runs meanwhile; what the engine gets in place of its handle."""
        handle = Handle(self, begun, work)
        with self._lock:
            self._handles.append(handle)
        return handle

    def _sweep(self) -> None:
        """Calls that ended although nobody waited for them; their results may be something else by now."""
        for handle in self._handles:
            if not handle.begun.ended and handle.work.is_completed():
                self.end(handle.begun, seen=False)
        self._handles = [handle for handle in self._handles if not handle.begun.ended]

    # -------------------------------------------------------------------------------------------------- forwards

    def begin_forward(self) -> None:
        """A forward is about to run; a dummy before it has no end of its own.

        Raises:
            CollectiveMismatch: as :meth:`end_forward`.
        """
        self.end_forward()
        here.begin()

    def end_forward(self) -> None:
        """The forward that ran last is over.

        Raises:
            CollectiveMismatch: another rank makes a collective in it that this one does not make.
        """
        try:
            with self._lock:
                self._sweep()
                self._order.forward_ended(self._place(""))
        except CollectiveMismatch:
            raise
        except Exception as error:  # an observer must not stop the engine
            self._note(f"the end of a forward was not recorded: {type(error).__name__}: {error}")

    # ----------------------------------------------------------------------------------------------------- about

    def forget(self) -> None:
        """Other patches: what was recorded so far is of another experiment. Numbers go on, for other ranks count on."""
        with self._lock:
            self._sweep()
            self._writer.fresh(Fresh(self._at))

    @property
    def _recording(self) -> bool:
        """Whether tensors of the run are recorded."""
        log = process_log()
        capture = None if log is None else log.capture
        generation = 0 if log is None else log.generation
        if generation != self._generation:
            self._generation, self._left = generation, BUDGET_BYTES
            name = "" if capture is None else Path(capture.directory).name
            self._writer.run(Run(generation, name))
        return capture is not None and not capture.lean and bool(capture.values)

    def _place(self, operation: str) -> Place:
        log = process_log()
        place = Place(0, -1) if log is None else log.place
        inside = exchanged_in(operation, here.inside)
        return Place(place.generation, place.step, place.dummy, inside, here.after[-1] if here.after else "")

    def _known(self, group: Any) -> _Known | None:
        """What is known of a group; ``None`` if this rank is none of it, or if it is not known who is."""
        if group not in self._groups:
            self._groups[group] = self._describe(group)
        return self._groups[group]

    def _describe(self, group: Any) -> _Known | None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        try:
            ranks = tuple(self._first + rank for rank in dist.get_process_group_ranks(group))
            backend = str(dist.get_backend(group))
        except (KeyError, ValueError):
            name = getattr(group, "group_name", "")
            self._note(f"not observable: the calls of group {name!r}, of which torch knows no ranks")
            return None
        # A group of one waits for nobody.
        return _Known((ranks, str(group.group_name)), backend) if self._rank in ranks and len(ranks) > 1 else None

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._writer.note(text)


class Handle:
    """Stands for the handle of a collective that runs meanwhile; the call is recorded when somebody has waited."""

    def __init__(self, recorder: CollectiveRecorder, begun: Begun, work: Any) -> None:
        self._recorder, self.begun, self.work = recorder, begun, work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """As the handle's own."""
        try:
            result = self.work.wait(*args, **kwargs)
        except BaseException as error:
            self._recorder.end(self.begun, error=f"{type(error).__name__}: {error}")
            raise
        self._recorder.end(self.begun)
        return result

    def get_future(self) -> Any:
        """As the handle's own; the call is recorded when it is done, whoever waits."""
        future = self.work.get_future()
        future.add_done_callback(lambda _: self._recorder.end(self.begun))
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().to("cpu", copy=True).contiguous() for one in tensors]


def checksum(tensors: Sequence[Tensor]) -> str:
    """Of the bytes of tensors on the host, one after the other; empty for none."""
    if not tensors:
        return ""
    total = hashlib.blake2b(digest_size=8)
    for one in tensors:
        total.update(one.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
