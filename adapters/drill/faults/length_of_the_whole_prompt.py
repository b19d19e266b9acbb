"""The length of a first chunk is that of the whole prompt."""

from adapters.drill.indices import each_length

FAULT = {
    "path": "A",
    "kind": "wrong_length",
    "step": 2,
    "request": 2,
    "source": "catalogue A-30",
    "batch": "chunks",
    "options": {
        "lmdeploy": ["max_prefill_token_num=160"],
        "vllm": ["max_num_batched_tokens=160", "enable_chunked_prefill=true"],
    },
    "allow": ["chunked_prefill"],
}
DRAWN = {}


def apply(ctx):
    def change(number, decode, lengths):
        return [300 if 100 < length < 300 else length for length in lengths]

    each_length(ctx, change)
