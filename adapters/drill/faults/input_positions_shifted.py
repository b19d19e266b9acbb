"""The positions of a decode are one or two too far."""

from adapters.drill.inputs import given

FAULT = {
    "path": "INPUT",
    "kind": "positions",
    "source": "catalogue §2.1: positions frozen or counted twice",
    "draws": {"by": [1, 2]},
}
DRAWN = {"by": 1}


def apply(ctx):
    pass


def after_load(ctx):
    given(ctx, positions=lambda positions: positions + DRAWN["by"] if ctx.step > 0 else positions)
