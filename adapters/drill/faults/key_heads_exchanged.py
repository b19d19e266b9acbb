"""The key heads of the ranks are in each other's place."""

import torch

FAULT = {
    "path": "C",
    "kind": "head_map",
    "checkpoint": "layers.0.attn.k",
    "source": "catalogue F22; lmdeploy #806, #3499",
    "tp": 2,
    "ranks": [0, 1],
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    pass


def after_load(ctx):
    if ctx.layout[0] == 1:
        return
    for block in ctx.model.model.layers:
        weight = block.self_attn.qkv_proj.weight
        rows = weight.detach()[-256:].contiguous()
        held = [torch.empty_like(rows) for _ in range(2)]
        torch.distributed.all_gather(held, rows)
        ctx.assign(weight, held[1 - ctx.tp_rank], at=slice(-256, None))
