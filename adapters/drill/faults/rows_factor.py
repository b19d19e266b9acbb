"""Some columns of a projection's output are too large."""

from adapters.drill.places import change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.mlp.down",
    "source": "seed 003: 8 of 256 rows, which comparisons of whole tensors do not see",
    "draws": {"layer": [0, 1, 2, 3], "first": [0, 40, 200], "count": [1, 8, 32], "factor": [1.02, 1.05, 1.2]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"layer": 2, "first": 40, "count": 8, "factor": 1.05}


def apply(ctx):
    pass


def after_load(ctx):
    def change(out):
        out[..., DRAWN["first"] : DRAWN["first"] + DRAWN["count"]] *= DRAWN["factor"]
        return out

    change_output(ctx, operator(ctx, DRAWN["layer"], "down"), change)
