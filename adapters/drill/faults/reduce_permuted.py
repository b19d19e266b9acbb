"""The sum is read through a transposed view as if it were contiguous."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "permuted_rows",
    "checkpoint": "layers.{layer}.{name}",
    "source": "catalogue C: a buffer that is read in another layout",
    "tp": 2,
    "ranks": [0, 1],
    "draws": {"layer": [0, 1, 2, 3], "name": ["attn.o", "mlp.down"]},
}
DRAWN = {"layer": 1, "name": "attn.o"}


def apply(ctx):
    pass


def after_load(ctx):
    def read(partial, reduce):
        total = reduce(partial)
        return total.flatten(0, -2).t().contiguous().view(total.shape)

    reduced(ctx, {(DRAWN["layer"], DRAWN["name"].split(".")[1]): read})
