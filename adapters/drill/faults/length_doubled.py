"""Every decode counts twice in the length of the keys."""

from adapters.drill.indices import each_length

FAULT = {
    "path": "A",
    "kind": "doubled_length",
    "step": 1,
    "request": "{row}",
    "source": "catalogue A-24",
    "draws": {"row": [0, 1, 2]},
}
DRAWN = {"row": 1}


PROMPTS = (13, 7, 150)


def apply(ctx):
    def change(number, decode, lengths):
        if decode and len(lengths) > max(1, DRAWN["row"]):
            lengths[DRAWN["row"]] = 2 * lengths[DRAWN["row"]] - PROMPTS[DRAWN["row"]]
        return lengths

    each_length(ctx, change)
