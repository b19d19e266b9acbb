"""A projection accumulates with few bits of mantissa."""

from adapters.drill.places import change_output, operator, rounded

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.{part}",
    "source": "catalogue B-p: an accumulator in low precision; 5 bits is less than bfloat16's 7",
    "draws": {"layer": [0, 1, 2, 3], "part": ["mlp.down", "attn.o"], "bits": [3, 4, 5]},
}
DRAWN = {"layer": 2, "part": "mlp.down", "bits": 4}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], DRAWN["part"].split(".")[1])
    change_output(ctx, owner, lambda out: rounded(out, DRAWN["bits"]))
