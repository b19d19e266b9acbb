"""Lets a worker of lmdeploy's multiprocess executor go on while it waits at the executor's barrier.

Every 32nd message meets a barrier of all workers (``Notifier`` of lmdeploy 0.12.2, ``mp_executor``). A worker waits
there on its event loop, which stops the forward that an earlier message asked for. On an NPU that does no harm: a
collective is only put into a queue, so the other ranks' forwards end and they reach the barrier too. Over the simulated
device a collective blocks the host. Then rank 0 may wait in an ``all_reduce`` for rank 1, whose forward has not begun,
and rank 1 at the barrier for rank 0, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


def unblock(module: Any) -> None:
    """Wait at the barrier on a thread, as the executor does for everything else it waits for. Idempotent.

    Args:
        module: ``lmdeploy.pytorch.engine.executor.mp_executor``, or what stands for it.
    """
    notifier, last = module.Notifier, module.NUM_SHARED_BLOCK - 1
    if notifier.wait_async.__module__ == __name__:
        return

    @asynccontextmanager
    async def wait_async(self: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.events[self._event_id].wait)
        yield
        if self._event_id == last:
            await loop.run_in_executor(None, self.bar.wait)
            await loop.run_in_executor(None, self.bar.wait)
        self._update_event_id()

    notifier.wait_async = wait_async
