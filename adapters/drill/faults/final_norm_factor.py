"""The last normalisation returns a little too much."""

from adapters.drill.places import change_output, final_norm

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "final_norm",
    "source": "catalogue F12's class, at the end of the model",
    "draws": {"factor": [1.02, 1.05, 1.2]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"factor": 1.05}


def apply(ctx):
    pass


def after_load(ctx):
    change_output(ctx, final_norm(ctx), lambda out: out * DRAWN["factor"])
