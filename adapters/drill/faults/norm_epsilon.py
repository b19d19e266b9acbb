"""A normalisation adds a tenth to the mean square."""

from adapters.drill.places import module

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.{part}",
    "source": "catalogue F13; lmdeploy #444, llama.cpp #2373: eps read from the wrong key",
    "draws": {"layer": [0, 1, 2, 3], "part": ["attn_norm", "mlp_norm"], "eps": [0.1, 0.5]},
    "sweep": {"name": "eps", "neutral": 0.0},
}
DRAWN = {"layer": 0, "part": "attn_norm", "eps": 0.1}


def apply(ctx):
    pass


def after_load(ctx):
    owner = module(ctx, DRAWN["layer"], DRAWN["part"])
    for one in (owner, getattr(owner, "impl", owner)):
        for name in ("eps", "variance_epsilon"):
            if hasattr(one, name):
                ctx.replace(one, name, DRAWN["eps"])
