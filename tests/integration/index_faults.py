"""Faults of the cache's indices as patch files: what a wrong engine would do, where it makes or hands over an index.

Each is one text for both engines; what differs between them is in the seam that every text begins with. What must be
said of a fault was worked out from how it is made, before it was run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

#: Names of the faults that no table of the catalogue has say what is wrong in words.
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
        self.size = 128

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

#: F01: one too far, in decode.
_SLOT_PLUS_ONE = """
def apply(ctx):
    def change(step):
        if step.decode and step.number > 0:
            slots = step.slots
            slots[1] += 1
            step.slots = slots

    each_step(ctx, change)
"""

#: F02: a padding row of a graph keeps the slot that it had in the last step in which it was a request's.
_PADDING_STALE = """
def apply(ctx):
    bucket(ctx, 4, stale=True)
"""

#: The same graph as it should be.
_PADDING_RIGHT = """
def apply(ctx):
    bucket(ctx, 4, stale=False)
"""

#: F04, A-2, A-6: a dummy between two steps. In lmdeploy no block is reserved for it; in vllm-ascend it keeps the slots
#: of the last step.
_DUMMY = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.paging.scheduler as scheduler
        from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent as agent

        cache, managers = agent.build_cache_engine, scheduler.build_block_manager

        def build_cache_engine(self):
            self.cache_config.num_reserved_gpu_blocks = 0
            return cache(self)

        def build_block_manager(config):
            config.num_reserved_gpu_blocks = 0
            return managers(config)

        ctx.replace(agent, "build_cache_engine", build_cache_engine)
        ctx.replace(scheduler, "build_block_manager", build_block_manager)
        forward = agent._async_model_forward

        async def idle(self, inputs, *args, **kwargs):
            from adapters.probe.steplog import process_log

            if process_log()._step == 2:
                await forward(self, self.inputs_strategy.make_dummy(1, True, device="cuda", vocab_size=8), False)
            return await forward(self, inputs, *args, **kwargs)

        ctx.replace(agent, "_async_model_forward", idle)
        return
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner as runner

    execute = runner.execute_model

    def idle(self, scheduler_output, *args, **kwargs):
        from adapters.probe.steplog import process_log

        if scheduler_output.total_num_scheduled_tokens and not scheduler_output.scheduled_new_reqs:
            if process_log()._step == 2:
                self._dummy_run(1, force_attention=True, uniform_decode=True)
        return execute(self, scheduler_output, *args, **kwargs)

    ctx.replace(runner, "execute_model", idle)

    def keep(step):
        if step.number < 0:
            step.slots = step.slots

    each_step(ctx, keep)
"""

#: F06: eviction frees the blocks of a request and keeps its history.
_EVICTED = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.paging.seq_states.states as states

        original = states._free_seq

        def free(seq, scheduler):
            history = seq.num_history_ids
            original(seq, scheduler)
            seq.set_step(history)

        ctx.replace(states, "_free_seq", free)
        return
    from vllm.v1.core.sched.scheduler import Scheduler as scheduler

    original = scheduler._preempt_request

    def preempt(self, request, *args, **kwargs):
        computed = request.num_computed_tokens
        original(self, request, *args, **kwargs)
        request.num_computed_tokens = computed

    ctx.replace(scheduler, "_preempt_request", preempt)
"""

#: F07: after a prefix hit only new blocks are in the table.
_NEW_BLOCKS_ALONE = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import numpy
        from lmdeploy.pytorch.paging.block_manager.default_block_manager import DefaultBlockManager as manager
        from lmdeploy.pytorch.paging.block_trie import BlockTrie as trie

        match, table = trie.match, manager.get_block_table

        def matched(self, seq):
            match(self, seq)
            if not hasattr(seq, "hit"):
                seq.hit = len(seq.logical_blocks)

        def new_alone(self, msg):
            whole, hit = table(self, msg), getattr(msg, "hit", 0)
            return numpy.concatenate([whole[hit:], numpy.zeros(hit, dtype=whole.dtype)])

        ctx.replace(trie, "match", matched)
        ctx.replace(manager, "get_block_table", new_alone)
        return
    from vllm.v1.core.sched.output import NewRequestData as data

    original = data.from_request

    def new_alone(cls, request, block_ids, *args, **kwargs):
        hit = request.num_computed_tokens // 128
        return original(request, tuple(ids[hit:] for ids in block_ids), *args, **kwargs)

    ctx.replace(data, "from_request", new_alone)
"""

#: F08, A-19: blocks of twice the size, in the slots alone.
_DOUBLED_BLOCKS = """
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

#: A-36: attention takes blocks for half as large as they are.
_READER_BLOCKS = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.kernels.dlinfer as kernels

        original = kernels.paged_attention_fwd

        def halved(query, key, value, output, k_cache, v_cache, tables, *args, is_decoding, block_size, **kwargs):
            if is_decoding:
                block_size //= 2
                k_cache, v_cache = (one.view(-1, block_size, *one.shape[2:]) for one in (k_cache, v_cache))
                tables = torch.cat([tables, tables * 0], 1)
            given = {"is_decoding": is_decoding, "block_size": block_size, **kwargs}
            return original(query, key, value, output, k_cache, v_cache, tables, *args, **given)

        ctx.replace(kernels, "paged_attention_fwd", halved)
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as attention

    original = attention._get_fia_params

    def halved(self, *args, **kwargs):
        key, value, size, tables, lengths = original(self, *args, **kwargs)
        if tables is not None:
            size //= 2
            key, value = (one.view(-1, size, one.shape[-1]) for one in (key, value))
            tables = torch.cat([tables, tables * 0], 1)
        return key, value, size, tables, lengths

    ctx.replace(attention, "_get_fia_params", halved)
"""

#: A-13: a request ends, rows move up, and the block table's rows do not.
_STALE_ROW = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.strategies.ar.model_inputs import ARModelInputsStrategy as strategy

        original = strategy.index_select

        def select(inputs, indices, indice_cpu=None, block_offsets=None, **kwargs):
            if len(indices) < len(inputs.seq_length):
                block_offsets = inputs.block_offsets[: len(indices)]
            return original(inputs, indices, indice_cpu, block_offsets, **kwargs)

        ctx.replace(strategy, "index_select", select)
        return
    from vllm_ascend.worker.block_table import BlockTable as table

    ctx.replace(table, "move_row", lambda self, src, tgt: None)
    ctx.replace(table, "clear_row", lambda self, row: None)
"""

#: A-17, A-16: one step's table has another request's row.
_FOREIGN_ROW = """
def apply(ctx):
    def change(step):
        if step.number == 3:
            tables = step.tables
            tables[1] = tables[2]
            step.tables = tables

    each_step(ctx, change)
"""

#: A-4, A-5: a step's slots are those of the step before.
_STALE_SLOTS = """
def apply(ctx):
    last = {}

    def change(step):
        if step.number == 3:
            step.slots = last["slots"]
        last["slots"] = step.slots

    each_step(ctx, change)
"""

#: A-22: decodes that run along with a prefill have the slots of the row before.
_MIXED_SHIFT = """
def apply(ctx):
    def change(step):
        if step.number == 3:
            slots = step.slots
            slots[1] = slots[0]
            step.slots = slots

    each_step(ctx, change)
"""

#: A-23: one short.
_LENGTH_SHORT = """
def apply(ctx):
    def change(number, decode, lengths):
        return [length - (decode and row == 1) for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: The length stays that of the prompt.
_LENGTH_FROZEN = """
def apply(ctx):
    def change(number, decode, lengths):
        return [7 if decode and row == 1 else length for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: A-24, where it is used: every decode counts twice.
_LENGTH_DOUBLED = """
def apply(ctx):
    def change(number, decode, lengths):
        return [2 * length - 7 if decode and row == 1 else length for row, length in enumerate(lengths)]

    each_length(ctx, change)
"""

#: A-24 as it was: the longest of all lengths, which nobody reads the cache by.
_LONGEST_DOUBLED = """
def apply(ctx):
    def change(step):
        for name in ("max_kv_seq_len", "max_query_len"):
            value = getattr(step.metadata, name, None)
            if value is not None and step.decode:
                setattr(step.metadata, name, 2 * value)

    each_step(ctx, change)
"""

#: A-30: the length of a first chunk is that of the whole prompt.
_WHOLE_PROMPT = """
def apply(ctx):
    def change(number, decode, lengths):
        return [300 if 100 < length < 300 else length for length in lengths]

    each_length(ctx, change)
"""

#: A-31: slots of the second chunk begin at 0.
_CHUNK_RESTARTS = """
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

#: A-38: a block is handed out again while its request still reads it.
_RECYCLED = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.paging.block_manager.default_block_manager import DefaultBlockManager as manager

        original = manager.get_block_table
        first = {}

        def recycled(self, msg):
            found = original(self, msg)
            if len(found) > 1:
                first["block"] = found[0]
            elif len(found):
                found[0] = first["block"]
            return found

        ctx.replace(manager, "get_block_table", recycled)
        return
    from vllm.v1.core.sched.output import NewRequestData as data

    original = data.from_request
    first = {}

    def recycled(cls, request, block_ids, *args, **kwargs):
        if len(block_ids[0]) > 1:
            first["block"] = block_ids[0][0]
        else:
            block_ids = ([first["block"]],)
        return original(request, block_ids, *args, **kwargs)

    ctx.replace(data, "from_request", recycled)
"""

#: A prefix hit in what another request with other tokens wrote: the hash of a block says nothing of its tokens.
_PREFIX_FOREIGN = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.paging.block_trie as trie

        ctx.replace(trie.np, "array_equal", lambda *given: True)
        trie.hash = lambda key: 7
        return
    import vllm.v1.core.kv_cache_utils as utils

    original = utils.hash_block_tokens

    def blind(function, parent, tokens, extra=None):
        return original(function, parent, [7] * len(tokens), extra)

    ctx.replace(utils, "hash_block_tokens", blind)
"""

#: 000-T5.4-1: prefill does not write.
_NOT_WRITTEN = """
def apply(ctx):
    def change(step):
        if step.number == 0:
            slots = step.slots
            slots[13:20] = -1
            step.slots = slots

    each_step(ctx, change)
"""

#: A-9: the kernel takes the -1 of a padding row for an index.
_MINUS_ONE = """
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
_STOMPED = """
def apply(ctx):
    step = {}

    def change(found):
        step["tables"] = found.tables

    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == 2 and now() == 2:
            block = int(step["tables"][2, 0])
            key_cache[block, 5] = key[1]
            value_cache[block, 5] = value[1]

    after_write(ctx, wrong)
    each_step(ctx, change)
"""

#: The kernel writes something else than it is given, in one layer.
_CONTENT = """
def apply(ctx):
    def wrong(layer, key, value, key_cache, value_cache, slots):
        if layer == 1 and now() == 2:
            key_cache.view(-1, *key_cache.shape[2:])[int(slots[1])] *= 1.5

    after_write(ctx, wrong)
"""

#: One layer has a slot of its own.
_ONE_LAYER = """
def apply(ctx):
    state = {}

    def change(step):
        state["step"], state["layer"] = step, 0

    each_step(ctx, change)

    def shifted(metadata):
        layer, step = state["layer"], state["step"]
        state["layer"] += 1
        if layer != 2 or step.number != 2:
            return metadata
        one = Step(ctx.engine, copy.copy(metadata))
        slots = one.slots
        slots[1] += 2
        one.slots = slots
        return one.metadata

    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.attention import DlinferAttentionImpl as attention

        place = 5
    else:
        from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as attention

        place = 5
    original = attention.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if "attn_metadata" in kwargs:
            kwargs["attn_metadata"] = shifted(kwargs["attn_metadata"])
        else:
            args = (*args[:place], shifted(args[place]), *args[place + 1 :])
        return original(self, *args, **kwargs)

    ctx.replace(attention, "forward", forward)
"""

#: Lengths of the queries in another order than the queries.
_QUERIES_SWAPPED = """
def apply(ctx):
    def change(step):
        if step.number:
            return
        if ctx.engine == "lmdeploy":
            lengths = step.metadata.q_seqlens.clone()
            lengths[0], lengths[1] = int(lengths[1]), int(lengths[0])
            step.metadata.q_seqlens = step.metadata.kv_seqlens = lengths
        else:
            ends = list(step.metadata.actual_seq_lengths_q)
            ends[0] = ends[1] - ends[0]
            step.metadata.actual_seq_lengths_q = ends

    each_step(ctx, change)
"""

#: A-37: block ids of 64 bits.
_WIDE = """
def apply(ctx):
    def change(step):
        if step.number == 2:
            step.tables = step.tables.long()

    each_step(ctx, change)
"""

#: No fault: what stands behind the blocks that a length needs is read by nobody.
_TABLE_TAIL = """
def apply(ctx):
    def change(step):
        tables = step.tables
        if step.decode and tables.shape[1] > 1:
            tables[:2, 1:] = tables[2, :1]
            step.tables = tables

    each_step(ctx, change)
"""


@dataclass(frozen=True)
class Said:
    """What must be said: kind; writer and victim as (request, position), a padding or dummy row as (kind, -1)."""

    kind: str
    writer: tuple[str, int] | None
    victim: tuple[str, int] | None
    step: int
    layer: int = 0


@dataclass(frozen=True)
class IndexFault:
    """A fault; ``said`` by engine, empty where nothing may be said. ``options``: engine → ``name=value``."""

    text: str
    case: str
    said: dict[str, Said | None]
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)


def both(*args: object, layer: int = 0) -> dict[str, Said | None]:
    return {engine: Said(*args, layer=layer) for engine in ("lmdeploy", "vllm")}  # type: ignore[arg-type]


_PREFIX = {"lmdeploy": ("enable_prefix_caching=true",), "vllm": ("enable_prefix_caching=true",)}
_SILENT: dict[str, Said | None] = {"lmdeploy": None, "vllm": None}

INDEX_FAULTS: dict[str, IndexFault] = {
    "slot_plus_one": IndexFault(_SLOT_PLUS_ONE, "plain", both("wrong_slot", ("b", 7), ("b", 7), 1)),
    "padding_stale": IndexFault(
        _PADDING_STALE,
        "ends",
        {
            "lmdeploy": Said("padding_write", ("padding", -1), ("d", 36), 5),
            "vllm": Said("padding_write", ("padding", -1), ("d", 35), 4),
        },
    ),
    "padding_right": IndexFault(_PADDING_RIGHT, "ends", _SILENT),
    "dummy": IndexFault(
        _DUMMY,
        "reverse",
        {
            "lmdeploy": Said("dummy_write", ("dummy", -1), ("a", 0), 2),
            "vllm": Said("dummy_write", ("dummy", -1), ("a", 14), 2),
        },
    ),
    "evicted": IndexFault(
        _EVICTED,
        "memory",
        {
            "lmdeploy": Said("unwritten_history", ("a", 0), ("b", 0), 5),
            "vllm": Said("unwritten_history", ("a", 1536), ("c", 0), 4),
        },
        {"lmdeploy": ("num_gpu_blocks=16",), "vllm": ("num_gpu_blocks_override=16",)},
    ),
    "new_blocks_alone": IndexFault(_NEW_BLOCKS_ALONE, "prefix", both("prefix_missing", ("b", 299), ("b", 0), 2), _PREFIX),
    "doubled_blocks": IndexFault(
        _DOUBLED_BLOCKS,
        "reverse",
        both("wrong_block_size", ("a", 0), ("b", 0), 0),
        {"lmdeploy": ("num_gpu_blocks=48",), "vllm": ("num_gpu_blocks_override=48",)},
    ),
    "reader_blocks": IndexFault(_READER_BLOCKS, "plain", both("wrong_block_size", ("a", 13), ("a", 0), 1)),
    "stale_row": IndexFault(
        _STALE_ROW,
        "ends",
        {
            "lmdeploy": Said("stale_table", ("b", 11), ("b", 0), 5),
            "vllm": Said("stale_table", ("d", 36), ("d", 0), 4),
        },
    ),
    "foreign_row": IndexFault(_FOREIGN_ROW, "plain", both("foreign_row", ("b", 9), ("b", 0), 3)),
    "stale_slots": IndexFault(_STALE_SLOTS, "plain", both("wrong_slot", ("a", 15), ("a", 14), 3)),
    "mixed_shift": IndexFault(_MIXED_SHIFT, "late", {"vllm": Said("wrong_slot", ("b", 9), ("a", 15), 3)}),
    "length_short": IndexFault(
        _LENGTH_SHORT,
        "plain",
        {
            "lmdeploy": Said("wrong_length", ("b", 7), ("b", 6), 1),
            "vllm": Said("wrong_length", ("b", 7), ("b", 7), 1),
        },
    ),
    "length_frozen": IndexFault(
        _LENGTH_FROZEN,
        "plain",
        {
            "lmdeploy": Said("frozen_length", ("b", 7), ("b", 6), 1),
            "vllm": Said("frozen_length", ("b", 7), ("b", 7), 1),
        },
    ),
    "length_doubled": IndexFault(
        _LENGTH_DOUBLED,
        "plain",
        {
            "lmdeploy": Said("doubled_length", ("b", 7), ("b", 7), 1),
            "vllm": Said("doubled_length", ("b", 7), ("b", 8), 1),
        },
    ),
    "longest_doubled": IndexFault(_LONGEST_DOUBLED, "plain", _SILENT),
    "whole_prompt": IndexFault(
        _WHOLE_PROMPT,
        "chunks",
        both("wrong_length", ("c", 159), None, 2),
        {
            "lmdeploy": ("max_prefill_token_num=160",),
            "vllm": ("max_num_batched_tokens=160", "enable_chunked_prefill=true"),
        },
    ),
    "chunk_restarts": IndexFault(
        _CHUNK_RESTARTS,
        "chunks",
        both("wrong_slot", ("c", 160), ("c", 0), 3),
        {
            "lmdeploy": ("max_prefill_token_num=160",),
            "vllm": ("max_num_batched_tokens=160", "enable_chunked_prefill=true"),
        },
    ),
    "recycled": IndexFault(_RECYCLED, "recycled", both("double_owner", ("b", 0), ("a", 0), 3)),
    "prefix_foreign": IndexFault(_PREFIX_FOREIGN, "foreign", both("prefix_foreign", ("a", 0), ("b", 0), 2), _PREFIX),
    "not_written": IndexFault(_NOT_WRITTEN, "plain", both("not_written", ("b", 0), ("b", 0), 0)),
    "minus_one": IndexFault(_MINUS_ONE, "long", both("minus_one", ("padding", -1), ("a", 127), 1)),
    "stomped": IndexFault(_STOMPED, "plain", both("stomped", ("b", 8), ("c", 5), 2, layer=2)),
    "content": IndexFault(_CONTENT, "plain", both("content", ("b", 8), ("b", 8), 2, layer=1)),
    "one_layer": IndexFault(_ONE_LAYER, "plain", both("wrong_slot", ("b", 8), ("b", 8), 2, layer=2)),
    "queries_swapped": IndexFault(_QUERIES_SWAPPED, "plain", both("wrong_q_len", ("a", 12), None, 0)),
    "wide": IndexFault(_WIDE, "plain", both("index_dtype", None, None, 2)),
    "table_tail": IndexFault(_TABLE_TAIL, "plain", _SILENT),
}

#: Requests of each case: name, length of the prompt, new tokens, arrival.
_CASES: dict[str, list[tuple[str, int, int, int]]] = {
    "plain": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 150, 8, 0)],
    # They end the last first: lmdeploy's stack of free blocks is then in each run what it was in the first.
    "reverse": [("a", 13, 8, 0), ("b", 7, 7, 0), ("c", 150, 6, 0)],
    "long": [("a", 150, 8, 0), ("b", 7, 8, 0), ("c", 13, 8, 0)],
    "ends": [("a", 13, 4, 0), ("b", 7, 8, 0), ("c", 21, 8, 0), ("d", 33, 8, 0)],
    "late": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 150, 8, 3)],
    "chunks": [("a", 13, 8, 0), ("b", 7, 8, 0), ("c", 300, 8, 2)],
    "recycled": [("a", 150, 8, 0), ("b", 9, 4, 3)],
    "prefix": [("a", 300, 8, 0), ("b", 300, 8, 2)],
    "foreign": [("a", 300, 8, 0), ("b", 300, 8, 2)],
    "memory": [("a", 1518, 22, 0), ("b", 110, 30, 0), ("c", 110, 30, 0)],
}


def requests(case: str) -> list[dict[str, object]]:
    """The requests of a case, as its file has them."""
    found: list[dict[str, object]] = []
    for number, (name, length, new, arrival) in enumerate(_CASES[case], start=1):
        ids = [(7 * number + 11 * at + at * at * number) % 89 + 3 for at in range(length)]
        if case == "prefix" and found:
            first = found[0]["token_ids"]
            assert isinstance(first, list)
            ids = first[:256] + ids[256:]
        found.append({"name": name, "token_ids": ids, "max_new_tokens": new, "arrival": arrival})
    return found


def index_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(SEAM + INDEX_FAULTS[name].text)
    return path
