"""One layer is handed other slots than the rest."""

import copy
import functools

from adapters.drill.indices import Step
from adapters.drill.places import operator

FAULT = {
    "path": "A",
    "kind": "wrong_slot",
    "step": "{step}",
    "request": 1,
    "source": "catalogue A: indices are the same in all layers",
    "draws": {"layer": [1, 2, 3], "step": [1, 2, 4]},
}
DRAWN = {"layer": 2, "step": 2}


def apply(ctx):
    pass


def after_load(ctx):
    owner = operator(ctx, DRAWN["layer"], "attention")
    original = owner.forward

    def shifted(metadata):
        if metadata is None or ctx.step != DRAWN["step"] or len(ctx.rows) == 1:
            return metadata
        step = Step(ctx, copy.copy(metadata))
        slots = step.slots
        slots[1] += 2
        step.slots = slots
        return step.metadata

    @functools.wraps(original)
    def forward(*args, **kwargs):
        if "attn_metadata" in kwargs:
            kwargs["attn_metadata"] = shifted(kwargs["attn_metadata"])
        else:
            args = (*args[:5], shifted(args[5]), *args[6:])
        return original(*args, **kwargs)

    ctx.replace(owner, "forward", forward)
