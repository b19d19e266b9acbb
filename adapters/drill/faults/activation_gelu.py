"""An activation is GELU where the model has SiLU."""

from torch.nn.functional import gelu

from adapters.drill.places import operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.mlp.act",
    "source": "a fused operator with the activation of another model",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], "act")
    original = owner.forward

    def wrong(x, *args, **kwargs):
        gate, up = x.float().chunk(2, -1)
        other = gelu(gate) * up
        out = original(x, *args, **kwargs)
        return out.copy_(other.view(out.shape)) if ctx.step >= 0 else out

    ctx.replace(owner, "forward", wrong)
