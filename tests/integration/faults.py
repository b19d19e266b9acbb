"""Faults as patch files, each for one side: what a wrong engine would do, put there on purpose."""

from __future__ import annotations

from pathlib import Path

from align.drill.benign import FOLDER as BENIGN

_SWAP = """
def apply(ctx):
    pass


def after_load(ctx):
    weight = ctx.model.model.layers[1].mlp.gate_up_proj.weight.data
    half = weight.shape[0] // 2
    gate = weight[:half].clone()
    weight[:half] = weight[half:]
    weight[half:] = gate
"""

_NORM = """
def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.norm import DlinferRMSNormImpl as norm

        name = "forward"
    else:
        from vllm_ascend.ops.layernorm import AscendRMSNorm as norm

        name = "forward_oot"
    original = getattr(norm, name)

    def scaled(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if not getattr(self, "is_wrong", False):
            return result
        return (result[0] * 1.01, result[1]) if isinstance(result, tuple) else result * 1.01

    ctx.replace(norm, name, scaled)


def after_load(ctx):
    norm = ctx.model.model.layers[2].post_attention_layernorm
    getattr(norm, "impl", norm).is_wrong = True
"""

_ROW = """
def apply(ctx):
    pass


def after_load(ctx):
    ctx.model.model.layers[2].mlp.down_proj.weight.data[5] *= 1.02
"""

#: Under tensor parallelism alone: one rank puts a part that is too large into a reduce.
_PART_OF_A_RANK = """
def apply(ctx):
    pass


def after_load(ctx):
    if ctx.layout[0] == 1:
        return
    import torch.distributed as dist

    linear = ctx.model.model.layers[1].mlp.down_proj.impl
    original = linear.forward

    def forward(x, weight, bias=None, all_reduce=False, group=None, *args, **kwargs):
        out = original(x, weight, bias, False)
        if ctx.tp_rank == 1:
            out *= 1.05
        dist.all_reduce(out, group=group)
        return out

    ctx.replace(linear, "forward", forward)
"""

_HOST_ROPE = """
def apply(ctx):
    from lmdeploy.pytorch.backends.dlinfer.rotary_embedding import DlinferRotaryEmbeddingImpl as rotary

    def forward(self, x, position_ids):
        angles = position_ids.cpu().float().unsqueeze(-1) * self.inv_freq.cpu().view(1, 1, -1)
        angles = angles.repeat(1, 1, 2)
        return angles.cos().to(x.dtype).to(x.device), angles.sin().to(x.dtype).to(x.device)

    ctx.replace(rotary, "forward", forward)
"""

_HOST_ACTIVATION = """
def apply(ctx):
    from torch.nn.functional import silu
    from vllm_ascend.ops.activation import AscendSiluAndMul as activation

    def forward_oot(self, x):
        gate, up = x.cpu().float().chunk(2, dim=-1)
        return (silu(gate) * up).to(x.dtype).to(x.device)

    ctx.replace(activation, "forward_oot", forward_oot)
"""

#: The function that multiplies returns some rows that are too large; the weights stay as they are.
_ROWS = """
ROWS, FACTOR, LAYER = {rows}, {factor}, {layer}


def apply(ctx):
    pass


def after_load(ctx):
    linear = ctx.model.model.layers[LAYER].mlp.down_proj
    owner = getattr(linear, "impl", linear)
    original = owner.forward

    def wrong(*args, **kwargs):
        result = original(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        out[..., ROWS] = out[..., ROWS] * FACTOR
        return result

    ctx.replace(owner, "forward", wrong)
"""

#: The same rows, in the weights.
_WEIGHT_ROWS = """
def apply(ctx):
    pass


def after_load(ctx):
    for row in {rows}:
        ctx.model.model.layers[{layer}].mlp.down_proj.weight.data[row] *= {factor}
"""

_QK = """
def apply(ctx):
    pass


def after_load(ctx):
    attention = ctx.model.model.layers[1].self_attn
    q, k = attention.q_norm.weight.data, attention.k_norm.weight.data
    kept = q.clone()
    q.copy_(k)
    k.copy_(kept)
"""

_EPS = """
def apply(ctx):
    pass


def after_load(ctx):
    norm = ctx.model.model.layers[0].input_layernorm
    for one in (norm, getattr(norm, "impl", norm)):
        for name in ("eps", "variance_epsilon"):
            if hasattr(one, name):
                setattr(one, name, 1e-5)
"""

#: Angles of the rotary embedding as a product of two bfloat16 numbers.
_ROPE_PRECISION = """
import torch


def apply(ctx):
    if ctx.engine != "lmdeploy":
        return
    import lmdeploy.pytorch.backends.dlinfer.rotary_embedding as module

    def low(position_ids, inv_freq, scaling_factor, mscale=None, dtype=None):
        angles = (position_ids.bfloat16().unsqueeze(-1) * inv_freq.view(1, 1, -1).bfloat16()).float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    ctx.replace(module, "_rotary_embedding_fwd", low)


def after_load(ctx):
    if ctx.engine != "vllm":
        return
    rotary = ctx.model.model.layers[0].self_attn.rotary_emb
    table = rotary.cos_sin_cache
    inverse = 1.0 / rotary.base ** (torch.arange(0, rotary.rotary_dim, 2).float() / rotary.rotary_dim)
    angles = (torch.arange(len(table)).bfloat16()[:, None] * inverse.bfloat16()).float()
    table.copy_(torch.cat((angles.cos(), angles.sin()), -1).to(table.dtype))
"""

#: The rotary embedding of a model with rope_scaling, without it.
_ROPE_SCALING = """
import torch


def apply(ctx):
    pass


def after_load(ctx):
    if ctx.engine == "vllm":
        rotary = ctx.model.model.layers[0].self_attn.rotary_emb
        table = rotary.cos_sin_cache
        inverse = 1.0 / rotary.base ** (torch.arange(0, rotary.rotary_dim, 2).float() / rotary.rotary_dim)
        angles = torch.arange(len(table)).float()[:, None] * inverse
        table.copy_(torch.cat((angles.cos(), angles.sin()), -1).to(table.dtype))
        return
    for module in ctx.model.modules():
        if hasattr(module, "inv_freq"):
            size = 2 * module.inv_freq.numel()
            inverse = 1.0 / 1000000.0 ** (torch.arange(0, size, 2).float() / size)
            module.inv_freq = inverse.to(module.inv_freq.device)
            if hasattr(module, "mscale"):
                module.mscale = 1.0
"""


def rows(source: str, chosen: list[int], factor: float, layer: int) -> str:
    """A patch for some rows of a layer's down projection."""
    return source.format(rows=chosen, factor=factor, layer=layer)


EIGHT = [3, 17, 40, 41, 77, 100, 128, 200]
#: Name → source of the patch.
FAULTS = {
    # No fault: the sum is rounded before it is normed, as two operators do what one does.
    "unfused": (BENIGN / "unfused_norm.py").read_text(encoding="utf-8"),
    "qk": _QK,
    "eps": _EPS,
    "rope_precision": _ROPE_PRECISION,
    "rope_scaling": _ROPE_SCALING,
    "eight_rows": rows(_ROWS, EIGHT, 1.05, 2),
    "row_5": rows(_ROWS, [41], 1.05, 2),
    "row_2": rows(_ROWS, [41], 1.02, 2),
    "eight_weight_rows": rows(_WEIGHT_ROWS, EIGHT, 1.05, 2),
    "weight_row_5": rows(_WEIGHT_ROWS, [41], 1.05, 2),
    "weight_row_2": rows(_WEIGHT_ROWS, [41], 1.02, 2),
    "eight_rows_17": rows(_ROWS, EIGHT, 1.05, 17),
    "row_5_17": rows(_ROWS, [41], 1.05, 17),
    "row_2_17": rows(_ROWS, [41], 1.02, 17),
    "eight_weight_rows_17": rows(_WEIGHT_ROWS, EIGHT, 1.05, 17),
    "weight_row_5_17": rows(_WEIGHT_ROWS, [41], 1.05, 17),
    "weight_row_2_17": rows(_WEIGHT_ROWS, [41], 1.02, 17),
    "swap": _SWAP,
    "norm": _NORM,
    "part_of_a_rank": _PART_OF_A_RANK,
    "row": _ROW,
    "host_rope": _HOST_ROPE,
    "host_activation": _HOST_ACTIVATION,
}


def patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(FAULTS[name])
    return path
