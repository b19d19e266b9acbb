"""A block adds its attention to nothing."""

import functools

from adapters.drill.places import operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.mid",
    "source": "a fused add-and-norm whose residual was dropped",
    "draws": {"layer": [1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], "mlp_norm")
    original = owner.forward

    @functools.wraps(original)
    def wrong(x, *args, **kwargs):
        if ctx.step < 0:
            return original(x, *args, **kwargs)
        kept = x.clone()
        normed, total = original(x, *args, **kwargs)
        total.copy_(kept.view(total.shape))
        return normed, total

    ctx.replace(owner, "forward", wrong)
