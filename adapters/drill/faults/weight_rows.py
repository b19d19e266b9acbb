"""Some rows of a weight are too large."""

from adapters.drill.places import module

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "layers.{layer}.{part}",
    "source": "catalogue B-w: a shard or a scale applied twice while loading",
    "draws": {"layer": [0, 1, 2, 3], "part": ["mlp.down", "attn.o"], "row": [3, 41, 128], "factor": [1.02, 1.1, 2.0]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"layer": 2, "part": "mlp.down", "row": 41, "factor": 1.1}


def apply(ctx):
    pass


def after_load(ctx):
    weight = module(ctx, DRAWN["layer"], DRAWN["part"].split(".")[1]).weight
    row = DRAWN["row"]
    ctx.assign(weight, weight[row].detach() * DRAWN["factor"], at=row)
