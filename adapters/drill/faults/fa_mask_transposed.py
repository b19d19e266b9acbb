"""The mask hides the past and shows the future."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "seed 001 F.1; seed 000 §5.2",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    key = "mask" if "mask" in given else "atten_mask"
    if given.get(key) is not None:
        given[key] = given[key].T.contiguous()


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
