"""One rank does not join the sum that the others make, and goes on to the next one."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "order",
    "checkpoint": "layers.{layer}.{name}",
    "source": "catalogue 73, on one rank: whether a sum is made is decided by each rank for itself",
    "tp": 2,
    "ranks": [0, 1],
    "draws": {"layer": [0, 1, 2, 3], "name": ["attn.o", "mlp.down"]},
}
DRAWN = {"layer": 1, "name": "attn.o"}


def apply(ctx):
    pass


def after_load(ctx):
    def left_out(partial, reduce):
        return partial if ctx.tp_rank == 1 else reduce(partial)

    reduced(ctx, {(DRAWN["layer"], DRAWN["name"].split(".")[1]): left_out})
