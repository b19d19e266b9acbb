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

#: Name → source of the patch.
FAULTS = {"swap": _SWAP, "norm": _NORM, "row": _ROW}


def patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(FAULTS[name])
    return path
