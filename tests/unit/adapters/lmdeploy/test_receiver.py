"""A worker that waits at the executor's barrier goes on with its forward."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.lmdeploy import receiver

BLOCKS = 4
SECONDS = 1.0


def executor() -> Any:
    """A module like lmdeploy's, for two workers on threads; its barrier gives up after a second."""

    class Notifier:
        def __init__(self) -> None:
            self.events = [threading.Event() for _ in range(BLOCKS)]
            self.bar = threading.Barrier(3, timeout=SECONDS)
            self._event_id = BLOCKS - 1

        @asynccontextmanager
        async def wait_async(self) -> AsyncIterator[None]:
            await asyncio.get_running_loop().run_in_executor(None, self.events[self._event_id].wait)
            yield
            if self._event_id == BLOCKS - 1:
                self.bar.wait()
                self.bar.wait()
            self._update_event_id()

        def _update_event_id(self) -> None:
            self._event_id = (self._event_id + 1) % BLOCKS

    return SimpleNamespace(Notifier=Notifier, NUM_SHARED_BLOCK=BLOCKS)


def step(module: Any) -> list[int]:
    """Both workers compute one forward with a collective that blocks, while the last block of the buffer arrives."""
    one = module.Notifier()
    collective = threading.Barrier(2, timeout=3 * SECONDS)

    async def worker(rank: int) -> int:
        mine = module.Notifier()
        mine.events, mine.bar = one.events, one.bar

        async def forward() -> None:
            await asyncio.sleep(0.2 * rank)  # the second one begins later
            collective.wait()

        async def receive() -> None:
            if rank == 0:
                await asyncio.sleep(0.05)
            async with mine.wait_async():
                pass

        await asyncio.gather(forward(), receive())
        return int(mine._event_id)

    def send() -> None:
        one.events[BLOCKS - 1].set()
        one.bar.wait()
        one.events[BLOCKS - 1].clear()
        one.bar.wait()

    with ThreadPoolExecutor(3) as pool:
        sender = pool.submit(send)
        workers = [pool.submit(asyncio.run, worker(rank)) for rank in range(2)]
        found = [one.result() for one in workers]
        sender.result()
    return found


def test_as_it_is_both_wait_for_each_other() -> None:
    with pytest.raises(threading.BrokenBarrierError):
        step(executor())


def test_a_waiting_worker_computes_on() -> None:
    module = executor()
    receiver.unblock(module)
    assert step(module) == [0, 0]


def test_it_is_done_once() -> None:
    module = executor()
    receiver.unblock(module)
    first = module.Notifier.wait_async
    receiver.unblock(module)
    assert module.Notifier.wait_async is first


def test_blocks_before_the_last_meet_no_barrier() -> None:
    module = executor()
    receiver.unblock(module)

    async def receive() -> int:
        notifier = module.Notifier()
        notifier._event_id = 1
        notifier.events[1].set()
        async with notifier.wait_async():
            pass
        return int(notifier._event_id)

    assert asyncio.run(receive()) == 2
