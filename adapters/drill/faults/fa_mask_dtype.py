"""The mask has a dtype that the operator does not take."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "seed 001 F1-07",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    if "mask" in given:
        given["mask"] = given["mask"].bool()
    elif given.get("atten_mask") is not None:
        given["atten_mask"] = given["atten_mask"].half()


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
