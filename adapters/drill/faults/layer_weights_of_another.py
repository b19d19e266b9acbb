"""A layer has the down projection of the one behind it."""

from adapters.drill.places import module

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "layers.{layer}.mlp.down",
    "source": "catalogue B-w: an index of layers that is off by one in the loader",
    "draws": {"layer": [0, 1, 2]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def after_load(ctx):
    mine, other = (module(ctx, DRAWN["layer"] + more, "down").weight for more in (0, 1))
    ctx.assign(mine, other.detach().clone())
