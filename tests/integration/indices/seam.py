"""What every patch of an index begins with: where each engine makes and hands over its indices."""

from __future__ import annotations

SEAM = '''
import copy
import functools

import torch


def now():
    """Number of the running step; -1 in warm-up and dummies."""
    from adapters.probe.steplog import process_log

    log = process_log()
    return log._step if log is not None and log.in_step else -1


class Step:
    """What the engine hands to attention in a step. Slots and tables are copies until they are set."""

    def __init__(self, engine, metadata):
        names = ("kv_start_indices", "block_offsets") if engine == "lmdeploy" else ("slot_mapping", "block_tables")
        self._slots, self._tables = names
        self.metadata, self.number = metadata, now()
        decoding = metadata.is_decoding if engine == "lmdeploy" else metadata.attn_state.name == "DecodeOnly"
        self.decode = bool(decoding)
        #: Of the batch. Patches leave a request alone that runs alone: what is wrong is the batch.
        self.rows = getattr(metadata, self._tables).shape[0]

    @property
    def slots(self):
        return getattr(self.metadata, self._slots).clone()

    @slots.setter
    def slots(self, value):
        setattr(self.metadata, self._slots, value)

    @property
    def tables(self):
        return getattr(self.metadata, self._tables).clone()

    @tables.setter
    def tables(self, value):
        setattr(self.metadata, self._tables, value)


LAYER = {"next": 0}


def each_step(ctx, change):
    """Call change(step) once the engine has made the indices of a step."""
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend as maker

        original = maker.update_step_context

        def made(cls, context):
            result = original(context)
            LAYER["next"] = 0
            change(Step(ctx.engine, result.attn_metadata))
            return result

        ctx.replace(maker, "update_step_context", made)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder as maker

    original = maker.build

    def made(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        LAYER["next"] = 0
        change(Step(ctx.engine, result))
        return result

    ctx.replace(maker, "build", made)


def each_length(ctx, change):
    """change(number, decode, lengths) returns what the lengths of the keys are said to be.

    lmdeploy derives decode slots from them, vllm-ascend does not.
    """
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend as maker

        original = maker.update_step_context

        def made(cls, context):
            lengths = context.kv_seqlens
            given = change(now(), bool(context.is_decoding), lengths.tolist())
            context.kv_seqlens = torch.tensor(given, dtype=lengths.dtype, device=lengths.device)
            return original(context)

        ctx.replace(maker, "update_step_context", made)
        return

    def told(step):
        metadata = step.metadata
        given = change(step.number, step.decode, list(metadata.seq_lens_list))
        metadata.seq_lens_list = given
        metadata.seq_lens = torch.tensor(given, dtype=metadata.seq_lens.dtype)

    each_step(ctx, told)


def after_write(ctx, change):
    """change(layer, key, value, key_cache, value_cache, slots) runs behind the operator that writes."""

    def layer():
        LAYER["next"] += 1
        return LAYER["next"] - 1

    each_step(ctx, lambda step: None)
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.kernels.dlinfer as kernels

        original = kernels.fill_kv_cache

        def written(key, value, key_cache, value_cache, slots, **kwargs):
            result = original(key, value, key_cache, value_cache, slots, **kwargs)
            change(layer(), key, value, key_cache, value_cache, slots)
            return result

        ctx.replace(kernels, "fill_kv_cache", written)
        return
    from vllm_ascend.device.device_op import DeviceOperator as device

    original = device.reshape_and_cache

    def written(cls, key, value, key_cache, value_cache, slot_mapping):
        original(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
        change(layer(), key, value, key_cache, value_cache, slot_mapping)

    ctx.replace(device, "reshape_and_cache", written)


def bucket(ctx, size, stale):
    """Run decodes as a graph of ``size`` rows does: padding rows behind the batch, in buffers that stay.

    Padding rows have no slot, unless they are ``stale``: then they keep what they had when they were last real.
    """
    held = {}

    def fill(step):
        if not step.decode or step.number < 0:
            return
        slots, tables = step.slots, step.tables
        if not held:
            held["slots"] = slots.new_full((size,), -1)
            held["tables"] = tables.new_zeros((size, 16))
        rows = slots.shape[0]
        if rows > size:
            return
        if not stale:
            held["slots"][rows:] = -1
            held["tables"][rows:] = 0
        held["slots"][:rows] = slots
        held["tables"][:rows] = 0
        held["tables"][:rows, : tables.shape[1]] = tables
        wide = held["tables"][:, : max(tables.shape[1], 4)]
        step.metadata.graph = (rows, held["slots"].clone(), wide.clone())

    each_step(ctx, fill)

    def more(rows, by):
        return torch.cat([rows, rows[-1:].expand(by, *rows.shape[1:]) * 0.5])

    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionImpl as attention

        original = attention.forward

        @functools.wraps(original)
        def forward(self, query, key, value, k_cache, v_cache, attn_metadata, *args, **kwargs):
            rows, slots, tables = getattr(attn_metadata, "graph", (size, None, None))
            if rows == size:
                return original(self, query, key, value, k_cache, v_cache, attn_metadata, *args, **kwargs)
            one = copy.copy(attn_metadata)
            one.kv_start_indices, one.block_offsets = slots, tables
            one.kv_seqlens = torch.cat([one.kv_seqlens, one.kv_seqlens.new_ones(size - rows)])
            given = [more(tensor, size - rows) for tensor in (query, key, value)]
            return original(self, *given, k_cache, v_cache, one, *args, **kwargs)[:rows]

        ctx.replace(attention, "forward", forward)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as attention

    original = attention.forward

    @functools.wraps(original)
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *args, **kwargs):
        rows, slots, tables = getattr(attn_metadata, "graph", (size, None, None))
        if rows == size:
            return original(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        one = copy.copy(attn_metadata)
        one.slot_mapping, one.block_tables, one.num_actual_tokens = slots, tables, size
        one.seq_lens_list = [*one.seq_lens_list, *[1] * (size - rows)]
        one.seq_lens = torch.tensor(one.seq_lens_list, dtype=one.seq_lens.dtype)
        one.actual_seq_lengths_q = list(range(1, size + 1))
        given = [more(tensor, size - rows) for tensor in (query, key, value)]
        wide = more(output, size - rows)
        original(self, layer, *given, kv_cache, one, wide, *args, **kwargs)
        output.copy_(wide[:rows])
        return output

    ctx.replace(attention, "forward", forward)


def last_blocks_first(ctx):
    """Allocators that hand out the pool's last block first."""
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.paging.block_manager.base_block_manager import PhysicalAllocator as allocator

        original = allocator.__init__

        def reverse(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self._free_blocks = self._free_blocks[::-1].copy()

        ctx.replace(allocator, "__init__", reverse)
        return
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue as queue

    original = queue.__init__

    def reverse(self, blocks):
        original(self, [blocks[0], *blocks[:0:-1]])

    ctx.replace(queue, "__init__", reverse)
'''
