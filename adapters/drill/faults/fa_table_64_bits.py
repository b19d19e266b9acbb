"""The block table has 64 bits."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "decode",
    "source": "catalogue A-37; seed 000 §3.3",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    if given.get("block_table") is not None:
        given["block_table"] = given["block_table"].long()


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
