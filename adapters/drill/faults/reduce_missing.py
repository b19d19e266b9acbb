"""The parts of the ranks are not summed."""

from adapters.drill.ranks import reduced

FAULT = {
    "path": "C",
    "kind": "missing_reduce",
    "checkpoint": "layers.{layer}.{name}",
    "source": "catalogue F19; vllm-ascend #10557",
    "tp": 2,
    "ranks": [0, 1],
    "draws": {"layer": [0, 1, 2, 3], "name": ["attn.o", "mlp.down"]},
}
DRAWN = {"layer": 1, "name": "attn.o"}


def apply(ctx):
    pass


def after_load(ctx):
    reduced(ctx, {(DRAWN["layer"], DRAWN["name"].split(".")[1]): lambda partial, reduce: partial})
