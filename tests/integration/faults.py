"""Faults as patch files, each for one side: what a wrong engine would do, put there on purpose."""

from __future__ import annotations

from pathlib import Path

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

#: Name → source of the patch.
FAULTS = {
    "swap": _SWAP,
    "norm": _NORM,
    "row": _ROW,
    "host_rope": _HOST_ROPE,
    "host_activation": _HOST_ACTIVATION,
}


def patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(FAULTS[name])
    return path
