"""Data-parallel groups of lmdeploy step together; this decides what each of them has ready for a common forward.

Before every forward lmdeploy's ranks exchange what they have (``_prepare_dp_v1`` of the model agent, lmdeploy 0.12.2):
one that has nothing computes a dummy, one prefill makes the forward of all ranks a prefill, and if all have nothing the
forward is left out. Which rank has something at that moment depends on how fast the engines' own processes are. So that
a case always runs as it is written, ranks first agree here on the run that they are in, and one whose request is due
waits for it. The common forwards of a run, its cycles, are counted: a request's arrival is a cycle. A group gives its
engine no request before its rank has said that the run is agreed on: with a request at hand one rank would begin a run
of which another has not heard.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adapters.probe.collectives import unrecorded
from adapters.probe.launch import probe_dir, read_launch
from adapters.probe.spec import ProbeSpec, RequestSpec
from adapters.probe.steplog import StepLog, process_log

_POLL_SECONDS = 0.001
_IDLE_SECONDS = 0.02
#: How long a rank waits for the step behind the last token of its requests, which lmdeploy 0.12.2 makes because it
#: looks ahead. Where it comes late, it would be the first step of the next run on this rank alone.
SURPLUS_SECONDS = 5.0


def due_file(directory: Path, rank: int) -> Path:
    """Where a rank says for which cycle it waits for requests."""
    return directory / f"due-rank{rank}.json"


def read_due(directory: Path, rank: int, run: int) -> int:
    """The cycle of a run for which a rank waits for requests; -1 as long as it says nothing of this run."""
    try:
        plain = json.loads(due_file(directory, rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return -1
    return int(plain["cycle"]) if plain["run"] == run else -1


def _write_due(directory: Path, rank: int, run: int, cycle: int) -> None:
    target = due_file(directory, rank)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps({"run": run, "cycle": cycle}), encoding="utf-8")
    os.replace(temporary, target)


def next_cycle(requests: Iterable[RequestSpec], cycle: int) -> int:
    """The cycle after one in which no rank had anything: the next arrival comes now, as in an engine that ran dry."""
    return min((request.arrival for request in requests if request.arrival > cycle), default=cycle)


class Lockstep:
    """Of one worker.

    Args:
        log: of this worker's process.
        group: all ranks' group on the host; the engine uses it too, before each forward and after this.
    """

    def __init__(self, log: StepLog, group: Any, world: int) -> None:
        self._log, self._group, self._world = log, group, world
        self._run = 0
        #: Of this rank's group, in that run.
        self._mine: list[RequestSpec] = []
        self._said = (0, 0)
        self._idle = False
        #: The run whose surplus step was waited for.
        self._looked = 0
        #: Number of the next common forward of the run.
        self.cycle = 0

    @property
    def _behind(self) -> bool:
        """Whether this rank still has the step behind the last token of its requests, as far as it knows."""
        served, overran = map(self._log.served, self._mine), map(self._log.overran, self._mine)
        return self._looked != self._run and all(served) and not all(overran)

    async def _agreed(self) -> tuple[ProbeSpec | None, bool]:
        """The run that every rank has heard of, and whether any is behind in the one before.

        A newer run that is announced meanwhile is not agreed on.
        """
        while True:
            spec = self._log.spec
            mine = torch.tensor([0 if spec is None else spec.generation, int(self._behind)])
            theirs = torch.zeros(2 * self._world, dtype=mine.dtype)
            with unrecorded():
                work = dist.all_gather_into_tensor(theirs, mine, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                await asyncio.sleep(_POLL_SECONDS)
            work.wait()
            runs, behind = theirs.view(self._world, 2).unbind(1)
            if int(runs.min()) == int(runs.max()):
                return spec, bool(behind.any())
            await asyncio.sleep(_POLL_SECONDS)

    async def wait(self, inputs: Any) -> None:
        """Before a common forward: wait for the inputs of this rank's requests that are due.

        Args:
            inputs: queue of what the engine sent to this worker.
        """
        if self._idle:  # the engine asks all ranks again and again, and each time is recorded
            await asyncio.sleep(_IDLE_SECONDS)
        spec, behind = await self._agreed()
        run = 0 if spec is None else spec.generation
        if run != self._run and behind:  # they end the run before together
            await self._surplus(inputs)
            return
        if run != self._run:
            self._run, self.cycle = run, 0
        if spec is None:
            return
        self._log.enter_announced(spec)
        self._mine = mine = [one for one in spec.requests.values() if one.dp_rank == self._log.dp_rank]
        if not any(one.arrival <= self.cycle and not self._log.served(one) for one in mine):
            await self._surplus(inputs)
            return
        if (self.cycle == 0 or any(one.arrival for one in mine)) and self._said != (run, self.cycle):
            self._said = (run, self.cycle)
            _write_due(probe_dir(), self._log.rank, run, self.cycle)
        while inputs.qsize() == 0:
            await asyncio.sleep(_POLL_SECONDS)

    async def _surplus(self, inputs: Any) -> None:
        """Wait for the step behind the last token, once in a run: nobody promises that it comes."""
        if not self._behind:
            return
        self._looked = self._run
        deadline = time.monotonic() + SURPLUS_SECONDS
        while inputs.qsize() == 0 and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def left_out(self) -> None:
        """No rank had anything, and nothing was computed."""
        self._idle = True
        spec = self._log.spec
        if spec is not None and spec.generation == self._run:
            self.cycle = next_cycle(spec.requests.values(), self.cycle)

    def computed(self) -> None:
        """A common forward is over."""
        self._idle = False
        self.cycle += 1


def of_agent(agent: Any) -> Lockstep | None:
    """The lockstep of a model agent; ``None`` where groups do not step together, or requests are not held."""
    if agent.dist_config.dp == 1:
        return None
    if not hasattr(agent, "_align_lockstep"):
        log = process_log(agent.rank, agent.dist_config.dp_rank)
        assert log is not None
        held = read_launch().hold_arrivals
        world = agent.dist_config.world_size
        agent._align_lockstep = Lockstep(log, agent.dist_ctx.cpu_group, world) if held else None
    lockstep: Lockstep | None = agent._align_lockstep
    return lockstep


def install(maker: Any, agent: Any) -> None:
    """Wrap lmdeploy's ``DPForwardInputsMaker`` and ``BaseModelAgent``."""
    get, prepare = maker.get, agent._prepare_dp_v1

    @functools.wraps(get)
    async def waiting_get(self: Any) -> Any:
        lockstep = of_agent(self.model_agent)
        if lockstep is not None:
            await lockstep.wait(self._in_que)
        return await get(self)

    @functools.wraps(prepare)
    async def counted_prepare(self: Any, inputs: Any) -> Any:
        result = await prepare(self, inputs)
        lockstep = of_agent(self)
        if lockstep is not None and result[0] is None:
            lockstep.left_out()
        return result

    maker.get, agent._prepare_dp_v1 = waiting_get, counted_prepare
