"""A normalisation returns what it was given."""

from adapters.drill.places import operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.{part}",
    "source": "a fused operator whose norm half was dropped",
    "draws": {"layer": [0, 1, 2, 3], "part": ["attn.q_norm", "attn.k_norm"]},
}
DRAWN = {"layer": 1, "part": "attn.k_norm"}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], DRAWN["part"].split(".")[1])
    original = owner.forward

    def wrong(x, *args, **kwargs):
        given = x.clone()
        out = original(x, *args, **kwargs)
        return out.copy_(given.view(out.shape)) if ctx.step >= 0 else out

    ctx.replace(owner, "forward", wrong)
