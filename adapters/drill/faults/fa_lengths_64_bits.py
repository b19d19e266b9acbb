"""Lengths of the keys have 64 bits."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "decode",
    "source": "published signatures: int32 on the host",
    "engines": ["lmdeploy"],
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    if "context_lens" in given:
        given["context_lens"] = given["context_lens"].long()


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
