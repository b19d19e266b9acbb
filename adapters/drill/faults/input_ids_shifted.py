"""The model is given other token ids than the request has."""

from adapters.drill.inputs import given

FAULT = {
    "path": "INPUT",
    "kind": "token_ids",
    "source": "catalogue F29's class; vllm #27486, sglang #888: another sequence than was asked for",
    "draws": {"by": [1, 5]},
}
DRAWN = {"by": 1}


def apply(ctx):
    pass


def after_load(ctx):
    given(ctx, ids=lambda ids: (ids + DRAWN["by"]) % 900 if ctx.step == 0 else ids)
