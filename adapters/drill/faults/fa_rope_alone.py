"""A rotary part is passed for the query and not for the key."""

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "seed 001 F.6",
    "engines": ["vllm"],
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    given["query_rope"] = given["query"][..., :64].contiguous()


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
