"""The logits of a step are those of the step before."""

import functools

FAULT = {
    "path": "B",
    "kind": "operator",
    "checkpoint": "logits",
    "source": "catalogue §2.1 (2): an output buffer that is read before it is filled",
    "draws": {"step": [2, 4]},
}
DRAWN = {"step": 2}


LAST = {}


def apply(ctx):
    pass


def after_load(ctx):
    owner = ctx.model if ctx.engine == "lmdeploy" else ctx.model.logits_processor
    name = "get_logits" if ctx.engine == "lmdeploy" else "forward"
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrong(*args, **kwargs):
        logits = original(*args, **kwargs)
        before, LAST["logits"] = LAST.get("logits"), logits.clone()
        if ctx.step == DRAWN["step"] and before is not None and before.shape == logits.shape:
            return before
        return logits

    ctx.replace(owner, name, wrong)
