"""Gate and up are loaded into each other's place."""

import torch

from adapters.drill.places import module

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "layers.{layer}.mlp.gate",
    "source": "catalogue F15; nntrainer #4194",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def after_load(ctx):
    weight = module(ctx, DRAWN["layer"], "gate_up").weight
    gate, up = weight.detach().chunk(2)
    ctx.assign(weight, torch.cat([up, gate]))
