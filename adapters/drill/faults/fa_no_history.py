"""A decode sees its own token alone: a wrong argument, and a length of the cache that one layer does not share."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "A",
    "kind": ["wrong_length", "layer_length"],
    "layer": "{layer}",
    "phase": "decode",
    "source": "seed 001 F.3: kv length never 0 or 1 at decode",
    "engines": ["vllm"],
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    if given.get("block_table") is not None:
        given["actual_seq_lengths_kv"] = [1 for _ in given["actual_seq_lengths_kv"]]


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
