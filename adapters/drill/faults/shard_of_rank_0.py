"""Every rank holds the part of rank 0."""

import torch

FAULT = {
    "path": "C",
    "kind": "shard",
    "checkpoint": "layers.0.attn.q",
    "source": "a loader that does not know its rank",
    "tp": 2,
    "ranks": [1],
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    pass


def after_load(ctx):
    if ctx.layout[0] > 1:
        for block in ctx.model.model.layers:
            weight = block.self_attn.qkv_proj.weight.detach().clone()
            torch.distributed.broadcast(weight, src=0)
            ctx.assign(block.self_attn.qkv_proj.weight, weight)
