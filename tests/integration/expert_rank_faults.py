"""Faults of experts on several ranks: patches, and what must be said of each; worked out before it was run.

Each patch is one text for both engines. It acts where the real fault would, with more than one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

#: F20: the shared experts' result is reduced by itself, and again with the routed experts'. Behind the tap of
#: down_proj, so that its own result is right.
_SHARED = """
def apply(ctx):
    pass


def after_load(ctx):
    if ctx.layout[0] == 1:
        return
    block = ctx.model.model.layers[1].mlp

    def reduced(result):
        if ctx.engine == "lmdeploy":
            import lmdeploy.pytorch.distributed as dist

            total = result.clone()
            dist.all_reduce(total)
            return total
        from vllm.distributed import tensor_model_parallel_all_reduce

        return tensor_model_parallel_all_reduce(result.clone())

    if ctx.engine == "lmdeploy":
        original = block.shared_expert.forward
        ctx.replace(block.shared_expert, "forward", lambda x: reduced(original(x)))
        return
    part = block.experts._shared_experts_part2
    ctx.replace(block.experts, "_shared_experts_part2", lambda *args: reduced(part(*args)))
"""


#: An exchange that is changed on one rank: {change}, where {rank} is that rank's number.
_EXCHANGED = """
import torch

from adapters.drill.experts import Change, exchanged


def apply(ctx):
    pass


def after_load(ctx):
    if ctx.rank in {ranks}:
        exchanged(ctx, 1, Change({change}))
"""

#: What experts of other ranks made does not count.
_OWN_ALONE = """
from adapters.drill.experts import Change, exchanged


def apply(ctx):
    pass


def after_load(ctx):
    last = {}

    def keep(ids):
        last["own"] = ids // 4 == ctx.rank
        return ids

    exchanged(ctx, 1, Change(ids=keep, weights=lambda weights: weights * last["own"]))
"""

#: The block's own reduce: left out, or done twice.
_REDUCED = """
def apply(ctx):
    pass


def after_load(ctx):
    experts = ctx.model.model.layers[1].mlp.experts
    if ctx.engine == "lmdeploy":
        import lmdeploy.pytorch.nn.moe.default as module

        inside, original = [], module.moe_reduce
        combine = experts.combine

        def reduced(hidden_states, **kwargs):
            for _ in range({times} if inside else 1):
                hidden_states = original(hidden_states, **kwargs)
            return hidden_states

        def combined(state):
            inside.append(True)
            try:
                return combine(state)
            finally:
                inside.pop()

        ctx.replace(module, "moe_reduce", reduced)
        ctx.replace(experts, "combine", combined)
        return
    reduce = experts.runner._maybe_reduce_final_output

    def reduced(states, width):
        for _ in range({times}):
            states = reduce(states, width)
        return states

    ctx.replace(experts.runner, "_maybe_reduce_final_output", reduced)
"""

#: What an operator gives back in one layer, on one rank.
_OPERATOR = """
import torch

from adapters.drill.experts import Layer, operator_result

LAYER = Layer(1)


def changed(result):
{body}


def apply(ctx):
    if ctx.rank == 1:
        operator_result(ctx, LAYER, "{name}", changed)


def after_load(ctx):
    LAYER.mark(ctx)
"""

#: Rows that the kernel sends stand one place on.
_DISPATCH_ORDER = """    rows, _, _, _, counts = result[:5]
    count = int(counts[-1])
    return (torch.cat([rows[:count].roll(1, 0), rows[count:]]), *result[1:])"""

#: The first expert of the rank is said to have no rows, and the second those of both: the counts add up.
_DISPATCH_COUNTS = """    numbers = result[3].clone()
    numbers[0] = 0
    return (*result[:3], numbers, *result[4:])"""

#: Weights that are right, of other experts: {of} is given the number of experts of a rank.
_PLACED = """
import torch

from adapters.drill.experts import stacks


def apply(ctx):
    pass


def after_load(ctx):
    for layer in range(len(ctx.model.model.layers)):
        for stack in stacks(ctx, layer):
{body}
"""

#: Rank 1 holds rank 0's experts, as where a loader takes its place from the wrong group.
_OF_RANK_0 = """            held = [torch.empty_like(stack) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(held, stack.contiguous())
            stack.copy_(held[0])"""
#: The experts of rank 1 stand one place on.
_SHIFTED = """            if ctx.rank == 1:
                stack.copy_(stack.roll(1, 0).clone())"""


#: Rank 1 expects as many rows of rank 0 as of itself, and the other way round. vLLM alone lets one change that.
_SPLITS = """
from adapters.drill.experts import Layer

LAYER = Layer(1)


def apply(ctx):
    pass


def after_load(ctx):
    import vllm_ascend.ops.fused_moe.token_dispatcher as module

    LAYER.mark(ctx)
    original = module.async_all_to_all

    def exchange(rows, expected, sent, group, event=None):
        if LAYER and ctx.rank == 1 and ctx.step >= 0:
            expected = expected[::-1].copy()
        return original(rows, expected, sent, group, event)

    ctx.replace(module, "async_all_to_all", exchange)
"""


@dataclass(frozen=True)
class ExpertFault:
    """A patch and what must be said of it.

    Attributes:
        source: of the patch.
        model, layout: of the run, the latter as options.
        kind, checkpoint, ranks: of the first finding.
        numbers: what the evidence says of it.
        engines: on which it acts.
    """

    source: str
    kind: str
    checkpoint: str
    ranks: tuple[int, ...] = (0, 1)
    model: str = "qwen2-moe"
    layout: tuple[str, ...] = ("--tp", "2")
    numbers: dict[str, object] = field(default_factory=dict)
    engines: tuple[str, ...] = ("lmdeploy", "vllm")


def _exchanged(change: str, *ranks: int) -> str:
    return _EXCHANGED.format(change=change, ranks=ranks or (0, 1))


_TP, _TP_EP, _DP_EP = ("--tp", "2"), ("--tp", "2", "--ep", "2"), ("--dp", "2", "--ep", "2")
#: Two requests for one group and one for the other, whose exchange has a pad then.
_UNEQUAL = (*_DP_EP, "--only", "r0", "--only", "r1", "--only", "r2")
_ROUTED, _OUT = "layers.1.moe.routed", "layers.1.moe.out"


def _of(
    source: str, kind: str, checkpoint: str, ranks: tuple[int, ...], layout: tuple[str, ...], **numbers: object
) -> ExpertFault:
    return ExpertFault(source, kind, checkpoint, ranks, "qwen3-moe", layout, numbers)


def _dispatched(body: str) -> str:
    return _OPERATOR.format(name="npu_moe_distribute_dispatch_v2", body=body)


#: qwen3-moe has 8 experts, 2 for each token: 0 to 3 on rank 0, 4 to 7 on rank 1. Catalogue numbers in brackets.
EXPERT_FAULTS = {
    # F20 (76, 77): down_proj's part is right, the sum has the shared part once for each rank.
    "shared_twice": ExpertFault(_SHARED, "doubled_reduce", _OUT, numbers={"ratio": 2.0, "part": "shared"}),
    # (73, 80) and (74, 75): the parts are right on each rank, the block's result is one of them, or twice their sum.
    "not_reduced": _of(_REDUCED.format(times=0), "missing_reduce", _OUT, (0, 1), _TP),
    "reduced_twice": _of(_REDUCED.format(times=2), "doubled_reduce", _OUT, (0, 1), _TP, ratio=2.0),
    # (91) Rank 1 asks rank 0 for 4 to 7 as for 0 to 3: the rows of its own group are wrong, those of rank 0 right.
    "local_ids": _of(_exchanged("ids=lambda ids: ids % 4", 1), "expert_map", _ROUTED, (1,), _DP_EP, map="local"),
    # Weights are right as the router gave them: what comes home is weighed twice, or not at all.
    "weights_twice": _of(
        _exchanged("weights=torch.square"), "combine_weights", _ROUTED, (0, 1), _TP_EP, weights="twice"
    ),
    "weights_left_out": _of(
        _exchanged("weights=torch.ones_like", 1), "combine_weights", _ROUTED, (1,), _DP_EP, weights="left_out"
    ),
    # Half of the experts add nothing to the rows of both ranks: rows of rank 1 have rank 0's part alone, not their own.
    "absent": _of(_exchanged("made=lambda rows: rows * 0", 1), "collective", _ROUTED, (1,), _TP_EP, left_out=[1]),
    # (80) Nothing comes back from other ranks' experts: each rank's rows have what its own experts made.
    "own_alone": _of(_OWN_ALONE, "missing_reduce", _ROUTED, (0, 1), _TP_EP),
    # Numbers are right, for nobody reads what pads get: the exchange alone shows it.
    "mask_ignored": _of(
        _exchanged("mask=torch.ones_like", 1), "collective", _ROUTED, (1,), _UNEQUAL, operator="dispatch"
    ),
    # (90) The sums of rank 1's rows stand one row on.
    "home_order": _of(_exchanged("result=lambda rows: rows.roll(1, 0)", 1), "permuted_rows", _ROUTED, (1,), _DP_EP),
    # Rank 1's experts get their rows one place on, in whichever exchange: each row gets what was made of another one.
    "rows_mixed": _of(_exchanged("given=lambda rows: rows.roll(1, 0)", 1), "permuted_rows", _ROUTED, (1,), _TP_EP),
    # In decode, where the kernels exchange: rows of rank 1's experts in another order, or counted for other experts.
    "dispatch_order": _of(
        _dispatched(_DISPATCH_ORDER), "collective", _ROUTED, (1,), _TP_EP, operator="dispatch"
    ),
    "dispatch_counts": _of(
        _dispatched(_DISPATCH_COUNTS), "collective", _ROUTED, (1,), _DP_EP, operator="dispatch"
    ),
    # Found before anybody sends: rank 0 sends what rank 1 does not expect.
    "splits": replace(_of(_SPLITS, "order", _ROUTED, (0, 1), _TP_EP, differ=["rows"]), engines=("vllm",)),
    # (82, 91) The weights say it: what rank 1 holds are other experts than its own, in every layer.
    "of_rank_0": _of(
        _PLACED.format(body=_OF_RANK_0), "expert_map", "layers.0.moe.routed", (1,), _TP_EP,
        experts={"4": 0, "5": 1, "6": 2, "7": 3},
    ),
    "shifted": _of(
        _PLACED.format(body=_SHIFTED), "expert_map", "layers.0.moe.routed", (1,), _DP_EP,
        experts={"4": 7, "5": 4, "6": 5, "7": 6},
    ),
}  # fmt: skip


def expert_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(EXPERT_FAULTS[name].source, encoding="utf-8")
    return path
