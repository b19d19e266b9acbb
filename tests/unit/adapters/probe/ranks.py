"""A rank of a small engine over gloo, and what starts several of them: ``python -m … SCENARIO DIR RANK WORLD``.

Its model is two layers that reduce; a step runs them and then broadcasts a token.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adapters.base import EngineSpec
from adapters.probe.collectives import unrecorded, wrap_functions
from adapters.probe.launch import write_launch
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, write_spec
from envs.home import REPOSITORY

SECONDS = 240.0


@dataclass
class Ended:
    """How a rank ended; a rank that waits for another one is ended once that has failed."""

    code: int
    errors: str
    seconds: float


def run_ranks(scenario: str, directory: Path, world: int = 2) -> list[Ended]:
    """Start the ranks and wait for them; who waits for a rank that failed is killed, as the driver does it."""
    env = {**os.environ, "ALIGN_PROBE_DIR": str(directory), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    spec = EngineSpec("toy", "candidate", "", "bfloat16", str(directory), tp=world)
    os.environ["ALIGN_PROBE_DIR"] = str(directory)
    try:
        write_launch(spec)
    finally:
        del os.environ["ALIGN_PROBE_DIR"]
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, scenario, str(directory), str(rank), str(world)],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        while any(one.poll() is None for one in ranks) and time.monotonic() < started + SECONDS:
            if any(one.poll() not in (None, 0) for one in ranks):
                break
            time.sleep(0.02)
        seconds = time.monotonic() - started
    finally:
        for one in ranks:
            one.kill()
    return [Ended(one.wait(), (one.communicate()[1] or ""), seconds) for one in ranks]


# -------------------------------------------------------------------------------------------------- in the process


class Linear:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def _model(rank: int, skip: Callable[[int], bool] = lambda layer: False) -> list[Linear]:
    """Its functions tell where they are, as those of a model with taps do."""
    from adapters.probe.spots import here, placed

    layers = []
    for layer in range(2):
        one = Linear(rank)
        if skip(layer):
            one.forward = lambda x: x  # type: ignore[method-assign]
        one.forward = placed(  # type: ignore[method-assign]
            here, one.forward, (f"layers.{layer}.attn.o",)
        )
        layers.append(one)
    return layers


def _steps(rank: int, model: list[Linear], count: int, start: int = 0) -> None:
    from adapters.probe.steplog import process_log

    log = process_log(rank)
    assert log is not None
    for step in range(start, start + count):
        log.step([("k", step, 1)])
        x = torch.full((1, 4), rank + 1.0)
        for layer in model:
            x = layer.forward(x)
        log.end_step()
        token = torch.tensor([rank])
        handle = dist.broadcast(token, src=0, async_op=True)
        if step % 2:  # engines do either
            future = handle.get_future()
            while not future.done():
                time.sleep(0.001)
            future.wait()
        else:
            handle.wait()
        assert token.item() == 0
        with unrecorded():
            dist.barrier()


def clean(rank: int, directory: Path) -> None:
    """Every function once before the first run, then two runs of which the second records tensors."""
    world = dist.get_world_size()
    mine = torch.arange(4.0) + 10 * rank
    dist.all_reduce(mine.clone(), op=dist.ReduceOp.MAX)
    dist.all_gather([torch.empty(4) for _ in range(world)], mine)
    dist.all_gather_into_tensor(torch.empty(4 * world), mine)
    dist.gather(mine, [torch.empty(4) for _ in range(world)] if rank == 1 else None, dst=1)
    dist.reduce_scatter_tensor(torch.empty(2), mine.clone())
    dist.all_to_all_single(torch.empty(4), mine)
    dist.broadcast(mine.clone(), src=1)
    dist.barrier()
    dist.all_gather_object([None] * world, {"rank": rank})
    pair = dist.new_group([0, 1])
    alone = dist.new_group([1])
    dist.all_reduce(torch.ones(1), group=pair)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=alone)
    dist.barrier()
    requests = {"k": RequestSpec("r0", 1, 9)}
    model = _model(rank)
    for generation, capture in ((1, None), (2, CaptureSpec(str(directory / "trace")))):
        if rank == 0:
            write_spec(directory, ProbeSpec(generation, 1, requests, capture))
        dist.barrier()
        _steps(rank, model, 2)
        dist.barrier()


#: Experts chosen for the two tokens of each rank; expert e lives on rank e // 2.
CHOSEN = torch.tensor([[[0, 2], [3, 1]], [[1, 0], [2, 0]]], dtype=torch.int32)


def _routes(rank: int) -> list[tuple[int, int, int, int]]:
    """(expert, source, token, choice) of the rows that come to a rank, in the kernel's order."""
    return sorted(
        (int(CHOSEN[source, token, choice]), source, token, choice)
        for source in (0, 1)
        for token in (0, 1)
        for choice in (0, 1)
        if int(CHOSEN[source, token, choice]) // 2 == rank
    )


def _dispatch(x: torch.Tensor, expert_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """As the kernel, in a buffer that is longer than what comes; without communication, for all rows are known."""
    rank = dist.get_rank()
    where = _routes(rank)
    rows = torch.stack([_rows(source)[token] for _, source, token, _ in where])
    numbers = torch.tensor([sum(one[0] == 2 * rank + local for one in where) for local in (0, 1)])
    counts = [sum(one[:2] == (2 * rank + local, source) for one in where) for local in (0, 1) for source in (0, 1)]
    ends = torch.tensor(counts).cumsum(0).int()
    return torch.cat([rows, torch.full((5, 4), 77.0).bfloat16()]), torch.zeros(0), None, numbers, ends, None, None


def _combine(expand_x: torch.Tensor, expert_ids: torch.Tensor, _: Any, __: Any, expert_scales: torch.Tensor, *___: Any,
             **____: Any) -> torch.Tensor:  # fmt: skip
    """Of experts that give back what they got."""
    return (_rows(dist.get_rank()).float() * expert_scales.sum(1, keepdim=True)).bfloat16()


def _rows(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4).bfloat16() + rank


def experts(rank: int, directory: Path) -> None:
    """A layer's dispatch and combine, as an engine calls them, in a run that records tensors."""
    from adapters.probe.exchanges import wrap_exchanges
    from adapters.probe.spots import here
    from adapters.probe.steplog import process_log

    for name, function in (("dispatch", _dispatch), ("combine", _combine)):
        setattr(torch.ops.npu, f"npu_moe_distribute_{name}_v2", function)
    wrap_exchanges()
    if rank == 0:
        write_spec(directory, ProbeSpec(1, 1, {"k": RequestSpec("r0", 1, 9)}, CaptureSpec(str(directory / "trace"))))
    dist.barrier()
    log = process_log(rank)
    assert log is not None
    log.step([("k", 0, 1)])
    here.enter(("layers.1.moe.out",))
    known: dict[str, Any] = {"group_ep": "g", "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4}
    sent = torch.ops.npu.npu_moe_distribute_dispatch_v2(_rows(rank), CHOSEN[rank], **known)
    scales = torch.tensor([[0.5, 0.25], [0.75, 0.125]])
    torch.ops.npu.npu_moe_distribute_combine_v2(sent[0], CHOSEN[rank], None, sent[4], scales, **known)
    here.leave()
    log.end_step()
    dist.barrier()


def skip(rank: int, directory: Path) -> None:
    """In its third step rank 1 leaves out the call of layer 0."""
    _announce(rank, directory)
    model = _model(rank)
    _steps(rank, model, 2)
    _steps(rank, _model(rank, lambda layer: rank == 1 and layer == 0), 1, start=2)


def skip_last(rank: int, directory: Path) -> None:
    """In its last step rank 1 leaves out the call of layer 1, and then goes on to nothing."""
    from adapters.probe.steplog import process_log

    _announce(rank, directory)
    _steps(rank, _model(rank), 2)
    model = _model(rank, lambda layer: rank == 1 and layer == 1)
    log = process_log(rank)
    assert log is not None
    log.step([("k", 2, 1)])
    for layer in model:
        layer.forward(torch.ones(1, 4))
    log.end_step()
    time.sleep(SECONDS)


def failing(rank: int, directory: Path) -> None:
    """The records cannot be written any more; the engine goes on."""
    from adapters.probe import collectives

    dist.barrier()
    recorder: Any = collectives.process_recorder()
    assert recorder is not None
    recorder._writer._data.close()
    recorder._order.check = None
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def _announce(rank: int, directory: Path) -> None:
    if rank == 0:
        write_spec(directory, ProbeSpec(1, 1, {"k": RequestSpec("r0", 1, 9)}))
    dist.barrier()


SCENARIOS = {one.__name__: one for one in (clean, experts, skip, skip_last, failing)}


def main(scenario: str, directory: str, rank: str, world: str) -> None:
    wrap_functions()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=int(rank), world_size=int(world))
    SCENARIOS[scenario](int(rank), Path(directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
