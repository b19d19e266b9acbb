"""The parts of the logits are put together in the reverse order of the ranks."""

import torch

FAULT = {
    "path": "C",
    "kind": "gather_order",
    "checkpoint": "logits",
    "source": "catalogue C: gather order",
    "tp": 2,
    "engines": ["vllm"],
    "ranks": [0, 1],
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    if ctx.layout[0] == 1:
        return
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor

    original = AscendLogitsProcessor._gather_logits

    def reversed_ranks(self, logits):
        whole = original(self, logits)
        return None if whole is None else torch.cat(whole.chunk(ctx.layout[0], -1)[::-1], -1)

    ctx.replace(AscendLogitsProcessor, "_gather_logits", reversed_ranks)
