"""The number of heads is that of the whole model, not of the rank, or doubled."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "seed 001 F.7; heads after the TP split",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    given["num_kv_heads" if "num_kv_heads" in given else "num_heads"] *= 2


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
