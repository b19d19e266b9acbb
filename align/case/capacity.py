"""How large an engine must be made so that a case runs as it is written: nothing split, nothing preempted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from align.case.schema import Case


@dataclass(frozen=True)
class Capacity:
    """Sizes for :class:`adapters.base.EngineSpec`, of the fullest data-parallel rank.

    Attributes:
        max_model_len: longest prompt with its new tokens, in tokens.
        max_batch: requests that may run in one step.
        max_prefill_tokens: prompt tokens of the largest group that arrives together.
        num_blocks: KV-cache blocks per layer if all requests are at their longest at once, with one to spare
            for each.
    """

    max_model_len: int
    max_batch: int
    max_prefill_tokens: int
    num_blocks: int


def capacity(case: Case) -> Capacity:
    """Sizes that ``case`` needs."""
    block = case.batch.block_size
    running: Counter[int] = Counter()
    prefill: Counter[tuple[int, int]] = Counter()
    blocks: Counter[int] = Counter()
    longest = 0
    for request in case.requests:
        prompt = len(request.token_ids)
        length = prompt + case.new_tokens(request)
        longest = max(longest, length)
        running[request.dp_rank] += 1
        prefill[request.dp_rank, request.arrival if case.batch.together else 0] += prompt
        blocks[request.dp_rank] += -(-length // block) + 1
    return Capacity(
        max_model_len=longest,
        max_batch=case.batch.max_batch or max(running.values()),
        max_prefill_tokens=max(prefill.values()),
        num_blocks=max(blocks.values()) + 1,
    )
