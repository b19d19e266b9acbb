"""A rank is given the tokens of a decode in the reverse order."""

from adapters.drill.inputs import given

FAULT = {
    "path": "C",
    "kind": "batch_order",
    "checkpoint": "embed",
    "source": "catalogue C: the batch of one rank in another order",
    "tp": 2,
    "ranks": [1],
    "phase": "decode",
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    pass


def after_load(ctx):
    if ctx.tp_rank == 1 and ctx.layout[0] > 1:
        given(ctx, ids=lambda ids: ids.flip(-1) if ctx.step > 0 else ids)
