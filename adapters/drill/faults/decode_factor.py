"""Attention returns too much in decode alone."""

from adapters.drill.places import change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.attn.out",
    "phase": "decode",
    "source": "catalogue §2.1 (5): the first token is right, the next are wrong",
    "draws": {"layer": [0, 1, 2, 3], "factor": [1.05, 1.2]},
    "sweep": {"name": "factor", "neutral": 1.0},
}
DRAWN = {"layer": 1, "factor": 1.05}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], "attention")
    change_output(ctx, owner, lambda out: out * (DRAWN["factor"] if all(row.count == 1 for row in ctx.rows) else 1))
