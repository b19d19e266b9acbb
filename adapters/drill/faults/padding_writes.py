"""A padding row of a graph keeps the slot that it had as a request."""

from adapters.drill.indices import bucket

FAULT = {
    "path": "A",
    "kind": "padding_write",
    "step": None,
    "request": None,
    "source": "catalogue F02; dlinfer #306, vllm-ascend #3482",
    "batch": "ends",
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    bucket(ctx, 4, stale=True)
