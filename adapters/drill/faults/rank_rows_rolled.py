"""A rank puts the rows of the batch in another order into the sum."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "batch_order",
    "checkpoint": "layers.{layer}.{name}",
    "source": "catalogue C: rows of a batch in another order on one rank",
    "tp": 2,
    "ranks": [1],
    "draws": {"layer": [0, 1, 2, 3], "name": ["attn.o", "mlp.down"]},
}
DRAWN = {"layer": 1, "name": "attn.o"}


def apply(ctx):
    pass


def after_load(ctx):
    def rolled(partial, reduce):
        return reduce(partial.flatten(0, -2).roll(1, 0).view(partial.shape) if ctx.tp_rank == 1 else partial)

    reduced(ctx, {(DRAWN["layer"], DRAWN["name"].split(".")[1]): rolled})
