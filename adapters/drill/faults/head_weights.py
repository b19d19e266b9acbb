"""Some rows of the language model's head are another vocabulary entry's."""

FAULT = {
    "path": "B",
    "kind": "weights",
    "checkpoint": "logits",
    "source": "a vocabulary that was padded or permuted while loading",
    "draws": {"row": [5, 300, 700]},
}
DRAWN = {"row": 300}


def apply(ctx):
    pass


def after_load(ctx):
    weight = ctx.model.lm_head.weight
    row = DRAWN["row"]
    ctx.assign(weight, weight.detach()[row + 1], at=row)
