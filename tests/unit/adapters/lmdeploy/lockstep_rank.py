"""One rank of a test of groups that step together: run as ``lockstep_rank.py RANK PORT DELAYS``.

Its engine hands over one input after the other, each so many milliseconds after it may. What the rank computed in each
common forward is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from adapters.lmdeploy import lockstep as lockstep_module
from adapters.lmdeploy.lockstep import Lockstep
from adapters.probe.launch import probe_dir
from adapters.probe.spec import RequestSpec
from adapters.probe.steplog import StepLog

IDLE_ROUNDS = 3
#: Long enough for a step that is 100 ms late, which the engines of this test make if they are told to.
lockstep_module.SURPLUS_SECONDS = 0.5


async def feed(queue: asyncio.Queue[tuple[str, int, int]], key: str, request: RequestSpec, delays: list[int]) -> None:
    """The steps of the one request of this rank; a step is handed over when the one before was computed."""
    start, count = 0, request.prompt_len
    for delay in delays:
        await asyncio.sleep(delay / 1000)
        while not queue.empty():
            await asyncio.sleep(0)
        queue.put_nowait((key, start, count))
        start, count = start + count, 1


async def run(rank: int, delays: list[int]) -> list[str]:
    log = StepLog(probe_dir(), rank, rank)
    lockstep = Lockstep(log, dist.group.WORLD, 2)
    spec = log.spec
    assert spec is not None
    key, request = next((key, one) for key, one in spec.requests.items() if one.dp_rank == rank)
    queue: Any = asyncio.Queue()
    feeding = asyncio.ensure_future(feed(queue, key, request, delays)) if request.arrival == 0 else None
    done: list[str] = []
    empty = 0
    while empty < IDLE_ROUNDS:
        if feeding is None and rank and lockstep.cycle >= request.arrival:
            feeding = asyncio.ensure_future(feed(queue, key, request, delays))
        await lockstep.wait(queue)
        inputs = None if queue.empty() else queue.get_nowait()
        anything = torch.tensor([int(inputs is not None)])
        dist.all_reduce(anything)  # as the engine tells the others whether it has a dummy
        if not int(anything):
            lockstep.left_out()
            empty += 1
            continue
        if inputs is None:
            log.dummy(1, idle=True, cycle=lockstep.cycle)
            done.append("idle")
        else:
            log.step([inputs], cycle=lockstep.cycle)
            logits = torch.zeros(1, 4)
            logits[0, 1] = 1.0
            log.choose(logits, [inputs[0]])
            log.end_step()
            done.append(f"{request.name} {inputs[1]}+{inputs[2]}")
        lockstep.computed()
    return done


def main() -> None:
    rank, port, delays = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    print(json.dumps(asyncio.run(run(rank, delays))), flush=True)
    os._exit(0)  # the threads of the collectives may wait for the other rank, which has ended


if __name__ == "__main__":
    main()
