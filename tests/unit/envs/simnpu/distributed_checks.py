"""Collectives of the hccl backend against brute force; run by test_distributed.py, one process per rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch_npu._sim import distributed

from tests.unit.envs.simnpu.session import refused

Tensor = torch.Tensor
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "hccl", init_method=os.environ["STORE"], rank=RANK, world_size=SIZE, timeout=timedelta(seconds=40)
)
npu: Any = vars(torch)["npu"]
npu.set_device(RANK)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What ``rank`` contributes, known to every rank; on the host."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def everyone(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(rank, *shape, dtype=dtype) for rank in range(SIZE)]


def on_device(tensor: Tensor, expected: Tensor) -> None:
    assert tensor.device.type == "npu"
    assert tensor.device.index == RANK
    assert torch.equal(tensor.cpu(), expected), f"rank {RANK}: {tensor} is not {expected}"


def check_the_group_is_hccl() -> None:
    assert dist.get_backend() == "hccl"
    assert dist.is_hccl_available()  # type: ignore[attr-defined]
    assert dist.get_world_size() == SIZE


def check_all_reduce() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        x = values(RANK, 3, 4, dtype=dtype).to("npu")
        address = x.data_ptr()
        dist.all_reduce(x)
        on_device(x, sum(everyone(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)))
        assert x.data_ptr() == address
    for op, reduce in ((dist.ReduceOp.MAX, torch.maximum), (dist.ReduceOp.MIN, torch.minimum)):
        x = values(RANK, 5).to("npu")
        dist.all_reduce(x, op=op)
        on_device(x, reduce(*everyone(5)))


def check_all_reduce_goes_through_a_view() -> None:
    whole = torch.zeros(4, 3).to("npu")
    whole[RANK] = values(RANK, 3).to("npu")
    dist.all_reduce(whole[:2])
    on_device(whole, torch.cat([torch.stack(everyone(3)), torch.zeros(2, 3)]))


def check_gaps_are_refused() -> None:
    x = values(RANK, 4, 4).to("npu")
    with refused(RuntimeError, "contiguous"):
        dist.all_reduce(x[:, ::2])
    on_device(x, values(RANK, 4, 4))


def check_broadcast() -> None:
    for source in range(SIZE):
        x = values(RANK, 7).to("npu")
        dist.broadcast(x, source)
        on_device(x, values(source, 7))
        work = dist.broadcast(y := values(RANK, 2, 2).to("npu"), source, async_op=True)
        assert work is not None
        work.wait()
        on_device(y, values(source, 2, 2))


def check_asynchronous_work_keeps_its_tensors_alive() -> None:
    """Nobody but the collective holds these tensors, and the memory would be used again at once."""
    works = []
    for _ in range(60):
        works.append(dist.all_reduce(torch.ones(4096).to("npu"), async_op=True))
        junk = [torch.full((4096,), 7.0).to("npu") for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()
    assert all((tensor == 7).all() for tensor in junk)
    dist.barrier()
    dist.all_reduce(torch.ones(1).to("npu"))
    assert len(distributed._in_flight) <= 1, "finished work still holds its tensors"


def check_all_gather() -> None:
    gathered = [torch.empty(2, 3).to("npu") for _ in range(SIZE)]
    dist.all_gather(gathered, values(RANK, 2, 3).to("npu"))
    for rank, tensor in enumerate(gathered):
        on_device(tensor, values(rank, 2, 3))


def check_uneven_all_gather() -> None:
    for asynchronous in (False, True):
        gathered = [torch.empty(2 + 3 * rank, 2).to("npu") for rank in range(SIZE)]
        work = dist.all_gather(gathered, values(RANK, 2 + 3 * RANK, 2).to("npu"), async_op=asynchronous)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
            assert work.is_completed()
        for rank, tensor in enumerate(gathered):
            on_device(tensor, values(rank, 2 + 3 * rank, 2))


def check_several_works_are_waited_for_together() -> None:
    """An uneven all_gather is several broadcasts, and the last may finish first."""

    class Work:
        done = False

        def is_completed(self) -> bool:
            return self.done

        def wait(self, timeout: timedelta | None = None) -> bool:
            self.done = True
            return True

    for given in (None, timedelta(seconds=1)):
        works = [Work() for _ in range(3)]
        together = distributed._Together(works)
        works[-1].done = True
        assert not together.is_completed()
        assert together.wait(given)
        assert together.is_completed()
    gathered = [torch.empty(1 + rank).to("npu") for rank in range(SIZE)]
    work: Any = dist.all_gather(gathered, values(RANK, 1 + RANK).to("npu"), async_op=True)
    assert isinstance(work, distributed._Together)
    work.wait()


def check_all_gather_into_tensor() -> None:
    whole = torch.empty(2 * SIZE, 3).to("npu")
    dist.all_gather_into_tensor(whole, values(RANK, 2, 3).to("npu"))
    on_device(whole, torch.cat(everyone(2, 3)))


def check_reduce_scatter() -> None:
    whole = sum(everyone(2 * SIZE, 3), torch.zeros(2 * SIZE, 3))
    part = torch.empty(2, 3).to("npu")
    dist.reduce_scatter_tensor(part, values(RANK, 2 * SIZE, 3).to("npu"))
    on_device(part, whole[2 * RANK : 2 * RANK + 2])
    part = torch.empty(2, 3).to("npu")
    dist.reduce_scatter(part, list(values(RANK, 2 * SIZE, 3).to("npu").split(2)))
    on_device(part, whole[2 * RANK : 2 * RANK + 2])


def check_uneven_reduce_scatter() -> None:
    lengths = [3 + rank for rank in range(SIZE)]
    part = torch.empty(lengths[RANK], 2).to("npu")
    dist.reduce_scatter(part, list(values(RANK, sum(lengths), 2).to("npu").split(lengths)))
    whole = sum(everyone(sum(lengths), 2), torch.zeros(sum(lengths), 2))
    on_device(part, whole.split(lengths)[RANK])
    with refused(RuntimeError, "async_op=False"):
        dist.reduce_scatter(part, list(values(RANK, sum(lengths), 2).to("npu").split(lengths)), async_op=True)


def check_all_to_all_single() -> None:
    received = torch.empty(2 * SIZE, 3).to("npu")
    dist.all_to_all_single(received, values(RANK, 2 * SIZE, 3).to("npu"))
    on_device(received, torch.cat([sent[2 * RANK : 2 * RANK + 2] for sent in everyone(2 * SIZE, 3)]))


def check_uneven_all_to_all_single() -> None:
    counts = [[1 + (3 * source + target) % 4 for target in range(SIZE)] for source in range(SIZE)]
    incoming = [counts[source][RANK] for source in range(SIZE)]
    received = torch.empty(sum(incoming), 2).to("npu")
    dist.all_to_all_single(received, values(RANK, sum(counts[RANK]), 2).to("npu"), incoming, counts[RANK])
    parts = [values(rank, sum(counts[rank]), 2).split(counts[rank])[RANK] for rank in range(SIZE)]
    on_device(received, torch.cat(parts))


def check_gather_and_scatter() -> None:
    gathered = [torch.empty(3).to("npu") for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(values(RANK, 3).to("npu"), gathered, dst=1)
    for rank, tensor in enumerate(gathered or []):
        on_device(tensor, values(rank, 3))
    part = torch.empty(2).to("npu")
    dist.scatter(part, list(values(0, SIZE, 2).to("npu").unbind()) if RANK == 0 else None, src=0)
    on_device(part, values(0, SIZE, 2)[RANK])


def check_send_and_receive() -> None:
    x = torch.empty(4).to("npu")
    if RANK == 0:
        dist.send(values(0, 4).to("npu"), 1)
    elif RANK == 1:
        dist.recv(x, 0)
        on_device(x, values(0, 4))
    both = [
        dist.P2POp(dist.isend, values(RANK, 4).to("npu"), (RANK + 1) % SIZE),
        dist.P2POp(dist.irecv, x, (RANK - 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    on_device(x, values((RANK - 1) % SIZE, 4))


def check_barrier() -> None:
    dist.barrier()
    dist.barrier(device_ids=[RANK])
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()


def check_objects() -> None:
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK, "ids": list(range(RANK + 1))})
    assert objects == [{"rank": rank, "ids": list(range(rank + 1))} for rank in range(SIZE)]
    said = ["hello" if RANK == 0 else None]
    dist.broadcast_object_list(said, src=0)
    assert said == ["hello"]


def check_a_gloo_group_beside() -> None:
    beside = dist.new_group(list(range(SIZE)), backend="gloo")
    x = values(RANK, 5)
    dist.all_reduce(x, group=beside)
    assert x.device.type == "cpu"
    assert torch.equal(x, sum(everyone(5), torch.zeros(5)))


def check_groups_of_some_ranks() -> None:
    for members in ([0], list(range(SIZE))):
        group = dist.new_group(members, backend="hccl")
        if RANK in members:
            x = values(RANK, 5).to("npu")
            dist.all_reduce(x, group=group)
            on_device(x, sum((values(rank, 5) for rank in members), torch.zeros(5)))


def check_host_tensors_in_the_hccl_group() -> None:
    x = values(RANK, 3)
    dist.all_reduce(x)
    assert torch.equal(x, sum(everyone(3), torch.zeros(3)))


def check_functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    group: Any = dist.group.WORLD
    on_device(functional.all_reduce(values(RANK, 3).to("npu"), "sum", group) + 0, sum(everyone(3), torch.zeros(3)))
    gathered = functional.all_gather_tensor(values(RANK, 2, 2).to("npu"), 0, group) + 0
    on_device(gathered, torch.cat(everyone(2, 2)))


def check_the_name_of_a_group() -> None:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("npu"))
    name = backend.get_hccl_comm_name(RANK)
    assert distributed.groups[name] is backend


def more() -> dict[str, Callable[[], None]]:
    """Last of all."""
    return {"destroy": dist.destroy_process_group}
