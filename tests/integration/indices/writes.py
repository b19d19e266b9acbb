"""Patch texts: slots that are wrong, and kernels that write elsewhere."""

from __future__ import annotations

#: F01: one too far, in decode.
SLOT_PLUS_ONE = """
def apply(ctx):
    def change(step):
        if step.decode and step.rows > 1:
            slots = step.slots
            slots[1] += 1
            step.slots = slots

    each_step(ctx, change)
"""

#: F02: a padding row of a graph keeps the slot that it had in the last step in which it was a request's.
PADDING_STALE = """
def apply(ctx):
    bucket(ctx, 4, stale=True)
"""

#: The same graph as it should be.
PADDING_RIGHT = """
def apply(ctx):
    bucket(ctx, 4, stale=False)
"""

#: F08, A-19: blocks of twice the size, in the slots alone.
DOUBLED_BLOCKS = """
def apply(ctx):
    if ctx.engine == "vllm":
        from vllm_ascend.worker.block_table import BlockTable as table

        original = table.compute_slot_mapping

        def doubled(self, *args, **kwargs):
            self.block_size *= 2
            try:
                return original(self, *args, **kwargs)
            finally:
                self.block_size //= 2

        ctx.replace(table, "compute_slot_mapping", doubled)
        return
    from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend as maker

    original = maker.update_step_context

    def doubled(cls, context):
        ends, counts, tables = context.kv_seqlens.tolist(), context.q_seqlens.tolist(), context.block_offsets.tolist()
        slots = []
        for end, count, table in zip(ends, counts, tables):
            slots += [table[at // 256] * 256 + at % 256 for at in range(end - count, end)]
        result = original(context)
        result.attn_metadata.kv_start_indices = torch.tensor(slots, dtype=torch.int32, device="npu")
        return result

    ctx.replace(maker, "update_step_context", doubled)
"""

#: A-4, A-5: a step's slots are those of the step before.
STALE_SLOTS = """
def apply(ctx):
    last = {}

    def change(step):
        if step.number == 3 and len(last["slots"]) == step.rows > 1:
            step.slots = last["slots"]
        last["slots"] = step.slots

    each_step(ctx, change)
"""

#: A-22: decodes that run along with a prefill have the slots of the row before.
MIXED_SHIFT = """
def apply(ctx):
    def change(step):
        if step.number == 3 and step.rows > 1:
            slots = step.slots
            slots[1] = slots[0]
            step.slots = slots

    each_step(ctx, change)
"""

#: A-31: slots of the second chunk begin at 0.
CHUNK_RESTARTS = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend as maker

        original = maker.update_step_context

        def restarts(cls, context):
            history = (context.kv_seqlens - context.q_seqlens).tolist()
            count, table = context.q_seqlens.tolist(), context.block_offsets.tolist()
            result = original(context)
            if not context.is_decoding and history[0]:
                slots = [table[0][at // 128] * 128 + at % 128 for at in range(count[0])]
                result.attn_metadata.kv_start_indices = torch.tensor(slots, dtype=torch.int32, device="npu")
            return result

        ctx.replace(maker, "update_step_context", restarts)
        return
    from vllm_ascend.worker.block_table import BlockTable as table

    original = table.compute_slot_mapping

    def restarts(self, num_reqs, query_start_loc, positions):
        starts = query_start_loc.tolist()
        given = positions.clone()
        for first, end in zip(starts, starts[1:]):
            if end - first > 1:
                given[first:end] -= given[first].clone()
        return original(self, num_reqs, query_start_loc, given)

    ctx.replace(table, "compute_slot_mapping", restarts)
"""

#: 000-T5.4-1: prefill does not write.
NOT_WRITTEN = """
def apply(ctx):
    def change(step):
        if step.number == 0 and step.rows > 1:
            slots = step.slots
            slots[13:20] = -1
            step.slots = slots

    each_step(ctx, change)
"""

#: A-9: the kernel takes the -1 of a padding row for an index.
MINUS_ONE = """
def apply(ctx):
    last_blocks_first(ctx)

    def wrong(layer, key, value, key_cache, value_cache, slots):
        for row in (slots == -1).nonzero().flatten().tolist():
            key_cache.view(-1, *key_cache.shape[2:])[-1] = key[row]
            value_cache.view(-1, *value_cache.shape[2:])[-1] = value[row]

    after_write(ctx, wrong)
    bucket(ctx, 4, stale=False)
"""

#: The kernel writes a row a second time, elsewhere, in one layer.
STOMPED = """
def apply(ctx):
    step = {}

    def change(found):
        step["tables"] = found.tables

    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == 2 and now() == 2 and len(slots) > 2:
            block = int(step["tables"][2, 0])
            key_cache[block, 5] = key[1]
            value_cache[block, 5] = value[1]

    after_write(ctx, wrong)
    each_step(ctx, change)
"""

#: The kernel writes something else than it is given, in one layer.
CONTENT = """
def apply(ctx):
    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == 1 and now() == 2 and len(slots) > 1:
            key_cache.view(-1, *key_cache.shape[2:])[int(slots[1])] *= 1.5

    after_write(ctx, wrong)
"""

#: One layer has a slot of its own.
ONE_LAYER = """
def apply(ctx):
    state = {}

    def change(step):
        state["step"], state["layer"] = step, 0

    each_step(ctx, change)

    def shifted(metadata):
        if "step" not in state:
            return metadata  # warm-up without metadata
        layer, step = state["layer"], state["step"]
        state["layer"] += 1
        if layer != 2 or step.number != 2 or step.rows == 1:
            return metadata
        one = Step(ctx.engine, copy.copy(metadata))
        slots = one.slots
        slots[1] += 2
        one.slots = slots
        return one.metadata

    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionImpl as attention
    else:
        from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as attention
    original = attention.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if "attn_metadata" in kwargs:
            kwargs["attn_metadata"] = shifted(kwargs["attn_metadata"])
        else:
            args = (*args[:5], shifted(args[5]), *args[6:])
        return original(self, *args, **kwargs)

    ctx.replace(attention, "forward", forward)
"""
