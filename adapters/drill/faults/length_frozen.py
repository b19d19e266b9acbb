"""The length of the keys stays that of the prompt."""

from adapters.drill.indices import each_length

FAULT = {
    "path": "A",
    "kind": "frozen_length",
    "step": 1,
    "request": "{row}",
    "source": "catalogue §2.1 (2): values frozen at graph capture",
    "draws": {"row": [0, 1, 2]},
}
DRAWN = {"row": 1}


PROMPTS = (13, 7, 150)


def apply(ctx):
    def change(number, decode, lengths):
        if decode and len(lengths) > max(1, DRAWN["row"]):
            lengths[DRAWN["row"]] = PROMPTS[DRAWN["row"]]
        return lengths

    each_length(ctx, change)
