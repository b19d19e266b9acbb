"""A rank puts a little too much into the sum."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "collective",
    "checkpoint": "layers.{layer}.{name}",
    "source": "catalogue §2.1 (4): rank 0 right, other ranks wrong",
    "tp": 2,
    "ranks": [1],
    "draws": {"layer": [0, 1, 2, 3], "name": ["attn.o", "mlp.down"], "factor": [1.01, 1.05]},
}
DRAWN = {"layer": 1, "name": "attn.o", "factor": 1.01}


def apply(ctx):
    pass


def after_load(ctx):
    def scaled(partial, reduce):
        return reduce(partial * DRAWN["factor"] if ctx.tp_rank == 1 else partial)

    reduced(ctx, {(DRAWN["layer"], DRAWN["name"].split(".")[1]): scaled})
