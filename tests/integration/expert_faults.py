"""Faults of experts as patch files, each for one side and one rank: what a wrong engine would do, put there on purpose.

Names in brackets are those of the catalogue of known faults: F16, F18, N3.
"""

from __future__ import annotations

from pathlib import Path

from align.drill.benign import FOLDER as BENIGN

#: What a layer's router gives: ids and final weights ``[T, top_k]``, changed in place of the engine's own.
_ROUTED = """
import torch

LAYER = 1


def new_ids(ids, experts):
    return {ids}


def new_weights(weights):
    return {weights}


def apply(ctx):
    pass


def after_load(ctx):
    mlp = ctx.model.model.layers[LAYER].mlp
    if ctx.engine == "lmdeploy":
        choose, experts = mlp.softmax_topk.impl, mlp.experts.impl
        chosen, mixed = choose.forward, experts.forward

        def forward(x):
            weights, ids = chosen(x)
            return weights, new_ids(ids, x.shape[-1]).to(ids.dtype).contiguous()

        def mix(hidden_states, topk_weights, topk_ids, *args, **kwargs):
            usual = experts.renormalize
            if usual:  # the engine does so later, in place
                topk_weights.div_(topk_weights.sum(-1, keepdim=True))
            topk_weights.copy_(new_weights(topk_weights.clone()))
            experts.renormalize = False
            try:
                return mixed(hidden_states, topk_weights, topk_ids, *args, **kwargs)
            finally:
                experts.renormalize = usual

        ctx.replace(choose, "forward", forward)
        ctx.replace(experts, "forward", mix)
        return
    import vllm_ascend.ops.fused_moe.fused_moe as module

    method, inside = mlp.experts.quant_method, []
    applied, selected = method.apply, module.select_experts

    def apply_layer(*args, **kwargs):
        inside.append(True)
        try:
            return applied(*args, **kwargs)
        finally:
            inside.pop()

    def select(*args, **kwargs):
        weights, ids = selected(*args, **kwargs)
        if not inside:
            return weights, ids
        return new_weights(weights.clone()), new_ids(ids, kwargs["router_logits"].shape[-1]).to(ids.dtype).contiguous()

    ctx.replace(method, "apply", apply_layer)
    ctx.replace(module, "select_experts", select)
"""

#: F16: weights are not divided by their sum.
_NOT_RENORMALISED = """
def apply(ctx):
    pass


def after_load(ctx):
    experts = ctx.model.model.layers[1].mlp.experts
    if ctx.engine == "lmdeploy":
        impl = experts.impl
        mixed = impl.forward

        def mix(*args, **kwargs):
            usual, impl.renormalize = impl.renormalize, False
            try:
                return mixed(*args, **kwargs)
            finally:
                impl.renormalize = usual

        ctx.replace(impl, "forward", mix)
        return
    original = experts.quant_method.apply
    ctx.replace(
        experts.quant_method, "apply", lambda *args, **kwargs: original(*args, **{**kwargs, "renormalize": False})
    )
"""

_ONE_LESS = """
def apply(ctx):
    pass


def after_load(ctx):
    mlp = ctx.model.model.layers[1].mlp
    if ctx.engine == "lmdeploy":
        for impl in (mlp.softmax_topk.impl, mlp.experts.impl):

            def less(*args, impl=impl, original=impl.forward, **kwargs):
                impl.top_k -= 1
                try:
                    return original(*args, **kwargs)
                finally:
                    impl.top_k += 1

            ctx.replace(impl, "forward", less)
        return
    method = mlp.experts.quant_method
    original = method.apply
    ctx.replace(
        method, "apply", lambda *args, **kwargs: original(*args, **{**kwargs, "top_k": kwargs["top_k"] - 1})
    )
"""

#: F18: every router adds up in bfloat16, a few channels at a time.
_COARSE_ROUTER = """
import torch


def apply(ctx):
    pass


def after_load(ctx):
    for layer in ctx.model.model.layers:
        gate = layer.mlp.gate
        owner = getattr(gate, "impl", gate)
        original = owner.forward

        def forward(x, *args, original=original, weight=gate.weight, **kwargs):
            result = original(x, *args, **kwargs)
            out = result[0] if isinstance(result, tuple) else result
            total = torch.zeros_like(out)
            for part in range(0, x.shape[-1], {channels}):
                here = slice(part, part + {channels})
                total += torch.nn.functional.linear(x[..., here], weight[..., here])
            out.copy_(total)
            return result

        ctx.replace(owner, "forward", forward)
"""

_GATE_WEIGHT = """
def apply(ctx):
    pass


def after_load(ctx):
    ctx.model.model.layers[1].mlp.gate.weight.data[2] *= 1.05
"""

_STACK = """
def stacks(ctx, layer):
    experts = ctx.model.model.layers[layer].mlp.experts
    if ctx.engine == "lmdeploy":
        return experts.gate_up.weight.data, experts.down.weight.data
    return experts.w13_weight.data, experts.w2_weight.data


def apply(ctx):
    pass


"""

#: One expert's gate and up projection stand in each other's place.
_SWAPPED = (
    _STACK
    + """
def after_load(ctx):
    both = stacks(ctx, 1)[0][2]
    half = both.shape[-1] // 2
    gate = both[:, :half].clone()
    both[:, :half] = both[:, half:]
    both[:, half:] = gate
"""
)

#: One expert holds another one's weights.
_ANOTHER = (
    _STACK
    + """
def after_load(ctx):
    for stack in stacks(ctx, 1):
        stack[3] = stack[4]
"""
)

#: Nothing was copied into the experts of a layer.
_NOT_LOADED = (
    _STACK
    + """
def after_load(ctx):
    for stack in stacks(ctx, 1):
        stack.zero_()
"""
)

#: Between router and combination: what an engine's function of one expert layer is given.
_MLP = """
import torch


def owner_of(ctx):
    if ctx.engine == "lmdeploy":
        import dlinfer.vendor.ascend.moe as module

        return module, "apply_mlp"
    import vllm_ascend.ops.fused_moe.moe_mlp as module

    return module, "unquant_apply_mlp"


"""

#: Experts compute gelu instead of silu.
_ACTIVATION = (
    _MLP
    + """
def apply(ctx):
    module, name = owner_of(ctx)
    original = getattr(module, name)

    def gelu(hidden_states, gate_up, down, group_list, group_list_type=1):
        about = {"group_list": group_list, "split_item": 2, "group_type": 0, "group_list_type": group_list_type}
        both = torch.ops.npu.npu_grouped_matmul([hidden_states], [gate_up], **about)[0]
        gate, up = both.float().chunk(2, -1)
        inner = (torch.nn.functional.gelu(gate) * up).to(both.dtype)
        return torch.ops.npu.npu_grouped_matmul([inner], [down], **about)[0]

    def named(*args, **kwargs):
        return original(*args, **{**kwargs, "activation": module.MoEActivation.GELU})

    ctx.replace(module, name, gelu if ctx.engine == "lmdeploy" else named)
"""
)

#: What an expert layer is told of the rows of each expert: {groups}.
_GROUPS = (
    _MLP
    + """
def apply(ctx):
    module, name = owner_of(ctx)
    original = getattr(module, name)

    def wrong(*args, **kwargs):
        groups = kwargs["group_list"] if "group_list" in kwargs else args[3]
        groups = {groups}
        if "group_list" in kwargs:
            return original(*args, **{{**kwargs, "group_list": groups}})
        return original(*args[:3], groups, *args[4:], **kwargs)

    ctx.replace(module, name, wrong)
"""
)

#: The first expert's number of tokens is taken from the second one's (cumulative numbers turned into counts wrongly).
_FIRST_GROUP = "torch.cat([torch.minimum(groups[:1], groups[1:2]), groups[1:]])"
#: Cumulative numbers are handed over where counts are meant.
_CUMULATIVE = "groups.cumsum(0)"

_SHARED_OUT = """
def apply(ctx):
    pass


def after_load(ctx):
    mlp = ctx.model.model.layers[1].mlp
    # vllm-ascend calls the shared expert's parts, and not the whole of it.
    owner, name = (
        (mlp.shared_expert, "forward") if ctx.engine == "lmdeploy" else (mlp.experts, "_shared_experts_part2")
    )
    original = getattr(owner, name)
    ctx.replace(owner, name, lambda *args, **kwargs: original(*args, **kwargs) * 0)
"""

#: The shared expert's gate is not applied: as if its logit were very large, behind where it is computed.
_SHARED_GATE_OUT = """
def apply(ctx):
    pass


def after_load(ctx):
    mlp = ctx.model.model.layers[1].mlp
    gate = mlp.shared_expert_gate
    if ctx.engine == "lmdeploy":
        original = gate.forward
        ctx.replace(gate, "forward", lambda *args, **kwargs: original(*args, **kwargs) * 0 + 40)
        return
    shared = mlp.shared_expert

    def without(hidden_states, shared_gate_up):
        shared.expert_gate(hidden_states)
        return shared.down_proj(shared.act_fn(shared_gate_up))[0]

    ctx.replace(mlp.experts, "_shared_experts_part2", without)
"""

#: Experts of a layer are wrong for one token of the prefill, and for no other: row ROW of a step of COUNT rows.
ONE_TOKEN = """
LAYER, ROW, COUNT = {layer}, {row}, {count}


def apply(ctx):
    pass


def after_load(ctx):
    mlp = ctx.model.model.layers[LAYER].mlp
    owner, name = (mlp.experts.impl, "forward") if ctx.engine == "lmdeploy" else (mlp.experts.quant_method, "apply")
    original = getattr(owner, name)

    def wrong(*args, **kwargs):
        result = original(*args, **kwargs)
        out = getattr(result, "routed_out", result)
        if out.view(-1, out.shape[-1]).shape[0] == COUNT:
            out.view(-1, out.shape[-1])[ROW] *= -1
        return result

    ctx.replace(owner, name, wrong)
"""

#: The embedding's scale of training is left out, or one is added.
_EMBED_SCALE = """
def apply(ctx):
    pass


def after_load(ctx):
    embed = ctx.model.model.embed_tokens
    original = embed.forward
    ctx.replace(embed, "forward", lambda *args, **kwargs: original(*args, **kwargs) * 2)
"""


def routed(ids: str = "ids", weights: str = "weights") -> str:
    """A patch that changes what a router gives."""
    return _ROUTED.format(ids=ids, weights=weights)


def groups(changed: str) -> str:
    """A patch that tells experts other numbers of rows."""
    return _GROUPS.format(groups=changed)


#: Name → source of the patch.
EXPERT_FAULTS = {
    "not_renormalised": _NOT_RENORMALISED,
    "scaled": routed(weights="weights * 2.5"),
    "permuted_weights": routed(weights="weights.flip(-1)"),
    "ids_off_by_one": routed(ids="(ids + 1) % experts"),
    "one_less": _ONE_LESS,
    "coarse_router": _COARSE_ROUTER.replace("{channels}", "4"),
    # N3, no fault: choices that are one rounding apart change places, as another right kernel may have it.
    "near_tie": (BENIGN / "near_tie.py").read_text(encoding="utf-8"),
    "gate_weight": _GATE_WEIGHT,
    "swapped_expert": _SWAPPED,
    "another_expert": _ANOTHER,
    "not_loaded": _NOT_LOADED,
    "activation": _ACTIVATION,
    "first_group": groups(_FIRST_GROUP),
    "cumulative": groups(_CUMULATIVE),
    "shared_out": _SHARED_OUT,
    "shared_gate_out": _SHARED_GATE_OUT,
    "embed_scale": _EMBED_SCALE,
}


def write(source: str, directory: Path, name: str = "fault") -> Path:
    """A patch file."""
    path = directory / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def expert_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    return write(EXPERT_FAULTS[name], directory, name)
