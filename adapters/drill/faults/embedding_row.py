"""The embedding of some tokens is another one's."""

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "embed",
    "source": "a vocabulary that was resized or permuted while loading",
    "draws": {"shift": [1, 7, 64]},
}
DRAWN = {"shift": 1}


def apply(ctx):
    pass


def after_load(ctx):
    weight = ctx.model.model.embed_tokens.weight
    ctx.assign(weight, weight.detach().roll(DRAWN["shift"], 0))
