"""A normalisation returns a little too much."""

from adapters.drill.places import change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.{part}",
    "source": "catalogue F12's class: a wrong constant in a fused norm",
    "draws": {"layer": [0, 1, 2, 3], "part": ["attn_norm", "mlp_norm"], "factor": [1.02, 1.05, 1.2]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"layer": 2, "part": "mlp_norm", "factor": 1.05}


def apply(ctx):
    pass


def after_load(ctx):
    change_output(ctx, operator(ctx, DRAWN["layer"], DRAWN["part"]), lambda out: out * DRAWN["factor"])
