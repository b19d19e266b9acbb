"""One value of a projection is not a number in one step."""

from adapters.drill.places import by_token, change_output, operator

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "layers.{layer}.mlp.gate",
    "source": "an overflow that a kernel does not saturate",
    "draws": {"layer": [0, 1, 2, 3], "step": [0, 2, 4]},
}
DRAWN = {"layer": 1, "step": 2}


def apply(ctx):
    pass


def after_load(ctx):
    def change(out):
        if ctx.step == DRAWN["step"] and len(ctx.rows) > 1:
            by_token(ctx, out)[0, 0] = float("nan")
        return out

    change_output(ctx, operator(ctx, DRAWN["layer"], "gate_up"), change)
