"""The length of the keys is one short in decode."""

from adapters.drill.indices import each_length

FAULT = {
    "path": "A",
    "kind": "wrong_length",
    "step": 1,
    "request": "{row}",
    "source": "catalogue A-23",
    "draws": {"row": [0, 1, 2]},
}
DRAWN = {"row": 1}


def apply(ctx):
    def change(number, decode, lengths):
        return [length - 1 if decode and row == DRAWN["row"] else length for row, length in enumerate(lengths)]

    each_length(ctx, change)
