"""A projection returns the rows of a batch in another order."""

from adapters.drill.places import by_token, change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.mlp.down",
    "source": "catalogue §2.1 (6): only with two or more requests of unequal length",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 2}


def apply(ctx):
    pass


def after_load(ctx):
    def change(out):
        rows = by_token(ctx, out)
        return rows.roll(1, 0).view(out.shape) if len(ctx.rows) > 1 else out

    change_output(ctx, operator(ctx, DRAWN["layer"], "down"), change)
