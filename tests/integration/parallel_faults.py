"""Faults of communication and parallelism: patches, and what must be said of each; worked out before it was run.

Each patch is one text for both engines behind a seam that holds what differs between them. It acts where the real fault
would: with more than one tensor-parallel rank. The numbers of the ``qwen3`` preset: 4 layers, hidden size 256, 4 query
and 2 key/value heads of 128, so that at TP2 a rank has 2 query heads and 1 key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

#: ``reduced(ctx, {(layer, "o" | "down"): function})``: ``function(partial, reduce)`` makes the layer's result of this
#: rank's summand; ``reduce(tensor)`` is the sum over the ranks, in a tensor of its own.
SEAM = '''
import torch

WRONG = {}


def reduced(ctx, functions):
    """Only with several ranks. Instances are marked in after_load, which has to call mark(ctx)."""
    WRONG.clear()
    WRONG.update(functions)
    if ctx.layout[0] == 1:
        return
    if ctx.engine == "lmdeploy":
        import torch.distributed as dist
        from lmdeploy.pytorch.backends.dlinfer.linear import DlinferLinearImpl as linear

        original = linear.forward

        def forward(self, x, weight, bias=None, all_reduce=False, group=None, *args, **kwargs):
            function = getattr(self, "is_wrong", None)
            if function is None or not all_reduce:
                return original(self, x, weight, bias, all_reduce, group, *args, **kwargs)

            def reduce(tensor):
                total = tensor.clone()
                dist.all_reduce(total, group=group)
                return total

            return function(original(self, x, weight, bias, False, group), reduce)

        ctx.replace(linear, "forward", forward)
        return
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm_ascend.ops.linear import AscendRowParallelLinear as linear

    original = linear.forward

    def forward(self, input_, **kwargs):
        function = getattr(self, "is_wrong", None)
        if function is None:
            return original(self, input_, **kwargs)
        reduces, self.reduce_results = self.reduce_results, False
        try:
            partial, bias = original(self, input_, **kwargs)
        finally:
            self.reduce_results = reduces
        return function(partial, tensor_model_parallel_all_reduce), bias

    ctx.replace(linear, "forward", forward)


def mark(ctx):
    for (layer, which), function in WRONG.items():
        block = ctx.model.model.layers[layer]
        linear = block.self_attn.o_proj if which == "o" else block.mlp.down_proj
        (linear.impl if ctx.engine == "lmdeploy" else linear).is_wrong = function


def apply(ctx):
    pass


def after_load(ctx):
    mark(ctx)
'''

_MISSING = """
def apply(ctx):
    reduced(ctx, {(1, "o"): lambda partial, reduce: partial})
"""

_DOUBLED = """
def apply(ctx):
    reduced(ctx, {(2, "down"): lambda partial, reduce: reduce(reduce(partial))})
"""

#: The sum is read through a transposed view as if it were contiguous.
_PERMUTED = """
def apply(ctx):
    def read(partial, reduce):
        total = reduce(partial)
        return total.flatten(0, -2).t().contiguous().view(total.shape)

    reduced(ctx, {(1, "o"): read})
"""

#: Rank 1 reads the buffer of the reduce before, which layer 1's down projection filled.
_STALE = """
KEPT = {}


def apply(ctx):
    def keep(partial, reduce):
        KEPT["last"] = reduce(partial)
        return KEPT["last"].clone()

    def read(partial, reduce):
        total = reduce(partial)
        return KEPT["last"].clone() if ctx.tp_rank == 1 else total

    reduced(ctx, {(1, "down"): keep, (2, "o"): read})
"""

#: Rank 1 puts 1.01 times its product into the sum.
_SCALED = """
def apply(ctx):
    def scaled(partial, reduce):
        return reduce(partial * 1.01 if ctx.tp_rank == 1 else partial)

    reduced(ctx, {(1, "o"): scaled})
"""

#: The rows of what rank 1 puts in are those of the batch in another order.
_ROLLED = """
def apply(ctx):
    def rolled(partial, reduce):
        return reduce(partial.flatten(0, -2).roll(1, 0).view(partial.shape) if ctx.tp_rank == 1 else partial)

    reduced(ctx, {(2, "down"): rolled})
"""

#: Rank 0's part everywhere, as if nothing was split by rank.
_UNSPLIT = """
def after_load(ctx):
    if ctx.layout[0] > 1:
        for block in ctx.model.model.layers:
            torch.distributed.broadcast(block.self_attn.qkv_proj.weight.data, src=0)
"""

#: Key/value heads by r % kv_heads where r // replicas is right: with 4 ranks and 2 heads ranks 1 and 2 hold the other
#: head. With as many heads as ranks both are the same: there the last rank begins.
_HEAD_MAP = """
def after_load(ctx):
    tp = ctx.layout[0]
    if tp == 1:
        return
    heads, dim = 2, 128
    right = [rank // max(1, tp // heads) for rank in range(tp)]
    wrong = [rank % heads for rank in range(tp)] if tp > heads else right[::-1]
    for block in ctx.model.model.layers:
        rows = block.self_attn.qkv_proj.weight.data[-2 * dim :]
        held = [torch.empty_like(rows) for _ in range(tp)]
        torch.distributed.all_gather(held, rows.contiguous())
        rows.copy_(held[right.index(wrong[ctx.tp_rank])])
"""

_EMBEDDING = """
def apply(ctx):
    if ctx.engine == "lmdeploy" or ctx.layout[0] == 1:
        return
    from vllm_ascend.ops.vocab_parallel_embedding import AscendVocabParallelEmbedding as embedding

    def forward(self, input_):
        shard = self.shard_indices
        ids, outside = self._get_masked_input_and_mask(
            input_,
            shard.org_vocab_start_index,
            shard.org_vocab_end_index,
            shard.num_org_vocab_padding,
            shard.added_vocab_start_index,
            shard.added_vocab_end_index,
        )
        return self.quant_method.embedding(self, ids.long()).masked_fill_(outside.unsqueeze(-1), 0)

    ctx.replace(embedding, "_forward_origin", forward)
"""

_GATHER = """
def apply(ctx):
    if ctx.engine == "lmdeploy" or ctx.layout[0] == 1:
        return
    from vllm_ascend.ops.vocab_parallel_embedding import AscendLogitsProcessor as processor

    original = processor._gather_logits

    def reversed_ranks(self, logits):
        whole = original(self, logits)
        return None if whole is None else torch.cat(whole.chunk(ctx.layout[0], -1)[::-1], -1)

    ctx.replace(processor, "_gather_logits", reversed_ranks)
"""

#: Rank 1 is given the tokens of a decode step in the reverse order of the batch.
_ORDER = """
def apply(ctx):
    if ctx.layout[0] == 1 or ctx.tp_rank != 1:
        return
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent as agent

        agent_forward = agent._async_model_forward

        async def computed(self, inputs, *args, **kwargs):
            if not inputs.is_dummy and inputs.input_ids.numel() == 4:
                inputs.input_ids = inputs.input_ids.flip(-1)
            return await agent_forward(self, inputs, *args, **kwargs)

        ctx.replace(agent, "_async_model_forward", computed)
        return
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner as runner

    runner_forward = runner._model_forward

    def forward(self, count, input_ids=None, *args, **kwargs):
        if input_ids is not None and input_ids.numel() == 4:
            input_ids = input_ids.flip(-1)
        return runner_forward(self, count, input_ids, *args, **kwargs)

    ctx.replace(runner, "_model_forward", forward)
"""


def _source(text: str) -> str:
    return SEAM + text


@dataclass(frozen=True)
class ParallelFault:
    """A patch and what must be said of it at TP2.

    Attributes:
        source: of the patch.
        engines: on which it acts.
        kind, checkpoint, ranks, phase: of the first finding.
        path: of the first finding.
        numbers: what the evidence says of it.
    """

    source: str
    kind: str
    checkpoint: str | None
    ranks: tuple[int, ...]
    path: str = "C"
    phase: str | None = None
    engines: tuple[str, ...] = ("lmdeploy", "vllm")
    numbers: dict[str, object] = field(default_factory=dict)


_BOTH = (0, 1)
PARALLEL_FAULTS = {
    "missing": ParallelFault(_source(_MISSING), "missing_reduce", "layers.1.attn.o", _BOTH),
    "doubled": ParallelFault(
        _source(_DOUBLED), "doubled_reduce", "layers.2.mlp.down", _BOTH, numbers={"ratio": 2.0, "size": 2}
    ),
    "permuted": ParallelFault(
        _source(_PERMUTED), "permuted_rows", "layers.1.attn.o", _BOTH, numbers={"view": "transposed"}
    ),
    "stale": ParallelFault(
        _source(_STALE), "stale_buffer", "layers.2.attn.o", (1,), numbers={"holds": {"1": "layers.1.mlp.down (step 0)"}}
    ),
    "scaled": ParallelFault(_source(_SCALED), "collective", "layers.1.attn.o", (1,), numbers={"away": [1]}),
    "rolled": ParallelFault(_source(_ROLLED), "batch_order", "layers.2.mlp.down", (1,), numbers={"rank": 1}),
    "unsplit": ParallelFault(_source(_UNSPLIT), "shard", "layers.0.attn.q", (1,)),
    "head_map": ParallelFault(_source(_HEAD_MAP), "head_map", "layers.0.attn.k", _BOTH),
    "embedding": ParallelFault(_source(_EMBEDDING), "missing_reduce", "embed", _BOTH, engines=("vllm",)),
    "gather": ParallelFault(
        _source(_GATHER),
        "gather_order",
        "logits",
        _BOTH,
        engines=("vllm",),
        numbers={"blocks": [{"block": 0, "is": 1}, {"block": 1, "is": 0}]},
    ),
    "order": ParallelFault(_source(_ORDER), "batch_order", "embed", (1,), phase="decode"),
}


def parallel_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(PARALLEL_FAULTS[name].source)
    return path
