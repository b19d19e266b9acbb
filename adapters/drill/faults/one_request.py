"""A projection is wrong for one request of the batch."""

from adapters.drill.places import by_token, change_output, operator, rows_of

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.attn.o",
    "request": "{request}",
    "source": "catalogue §2.1 (6): tiles at the end of a batch",
    "draws": {"layer": [0, 1, 2, 3], "request": [0, 1, 2], "factor": [1.05, 1.5]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"layer": 1, "request": 1, "factor": 1.5}


def apply(ctx):
    pass


def after_load(ctx):
    def change(out):
        rows = by_token(ctx, out)
        rows[rows_of(ctx, DRAWN["request"])] *= DRAWN["factor"] if len(ctx.rows) > 2 else 1
        return out

    change_output(ctx, operator(ctx, DRAWN["layer"], "o"), change)
