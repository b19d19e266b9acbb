"""Slots are computed with blocks of twice the size."""

import torch

FAULT = {
    "path": "A",
    "kind": "wrong_block_size",
    "step": None,
    "request": None,
    "source": "catalogue F08; vllm-ascend #7019, #10442",
    "batch": "reverse",
    "options": {"lmdeploy": ["num_gpu_blocks=48"], "vllm": ["num_gpu_blocks_override=48"]},
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    if ctx.engine == "vllm":
        from vllm_ascend.worker.block_table import BlockTable

        original = BlockTable.compute_slot_mapping

        def doubled(self, *args, **kwargs):
            self.block_size *= 2
            try:
                return original(self, *args, **kwargs)
            finally:
                self.block_size //= 2

        ctx.replace(BlockTable, "compute_slot_mapping", doubled)
        return
    from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

    original = AscendOpsBackend.update_step_context

    def doubled(cls, context):
        ends, counts, tables = context.kv_seqlens.tolist(), context.q_seqlens.tolist(), context.block_offsets.tolist()
        slots = []
        for end, count, table in zip(ends, counts, tables, strict=False):
            slots += [table[at // 256] * 256 + at % 256 for at in range(end - count, end)]
        result = original(context)
        result.attn_metadata.kv_start_indices = torch.tensor(slots, dtype=torch.int32, device="npu")
        return result

    ctx.replace(AscendOpsBackend, "update_step_context", doubled)
