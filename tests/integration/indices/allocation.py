"""Patch texts: blocks that are handed out, kept or shared wrongly."""

from __future__ import annotations

#: F04, A-2, A-6: a dummy between two steps. In lmdeploy no block is reserved for it; in vllm-ascend it keeps the slots
#: of the last step.
DUMMY = """
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
EVICTED = """
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
NEW_BLOCKS_ALONE = """
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

#: A-38: a block is handed out again while its request still reads it.
RECYCLED = """
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
PREFIX_FOREIGN = """
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

#: A-13: a request ends, rows move up, and the block table's rows do not.
STALE_ROW = """
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
