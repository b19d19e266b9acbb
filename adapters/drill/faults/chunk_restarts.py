"""The slots of a prompt's second chunk begin at its first place."""

import itertools

import torch

FAULT = {
    "path": "A",
    "kind": "wrong_slot",
    "step": 3,
    "request": 2,
    "source": "catalogue A-31",
    "batch": "chunks",
    "options": {
        "lmdeploy": ["max_prefill_token_num=160"],
        "vllm": ["max_num_batched_tokens=160", "enable_chunked_prefill=true"],
    },
    "allow": ["chunked_prefill"],
}
DRAWN = {}


def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

        made = AscendOpsBackend.update_step_context

        def restarted(cls, context):
            history = (context.kv_seqlens - context.q_seqlens).tolist()
            count, table = context.q_seqlens.tolist(), context.block_offsets.tolist()
            result = made(context)
            if not context.is_decoding and history[0]:
                slots = [table[0][at // 128] * 128 + at % 128 for at in range(count[0])]
                result.attn_metadata.kv_start_indices = torch.tensor(slots, dtype=torch.int32, device="npu")
            return result

        ctx.replace(AscendOpsBackend, "update_step_context", restarted)
        return
    from vllm_ascend.worker.block_table import BlockTable

    original = BlockTable.compute_slot_mapping

    def restarts(self, num_reqs, query_start_loc, positions):
        starts = query_start_loc.tolist()
        given = positions.clone()
        for first, end in itertools.pairwise(starts):
            if end - first > 1:
                given[first:end] -= given[first].clone()
        return original(self, num_reqs, query_start_loc, given)

    ctx.replace(BlockTable, "compute_slot_mapping", restarts)
