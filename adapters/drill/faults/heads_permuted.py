"""The heads that attention returns are in another order."""

from adapters.drill.places import by_token, change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.attn.out",
    "source": "a layout (BNSD against BSND) that is read as the other",
    "draws": {"layer": [0, 1, 2, 3], "shift": [1, 2]},
}
DRAWN = {"layer": 1, "shift": 1}


def apply(ctx):
    pass


def after_load(ctx):
    def change(out):
        heads = by_token(ctx, out).unflatten(-1, (4, -1))
        return heads.roll(DRAWN["shift"], 1).reshape(out.shape)

    change_output(ctx, operator(ctx, DRAWN["layer"], "attention"), change)
