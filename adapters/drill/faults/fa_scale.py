"""The softmax scale is left at the operator's default of 1."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "catalogue F24; dlinfer #179, mobius #548",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    given["scale_value" if "scale_value" in given else "scale"] = 1.0


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
