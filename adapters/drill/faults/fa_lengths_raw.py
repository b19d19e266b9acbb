"""Lengths are plain where the layout asks for running totals, or the reverse."""

import torch

from adapters.drill.arguments import each_call

FAULT = {
    "path": "FA",
    "kind": "arguments",
    "layer": "{layer}",
    "phase": "prefill",
    "source": "seed 000 §5.3; seed 001 F.3",
    "draws": {"layer": [0, 1, 2, 3]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    pass


def change(name, given):
    if "seq_len" in given:
        given["seq_len"] = given["seq_len"].cumsum(0).to(torch.int32)
    elif "actual_seq_lengths" in given:
        ends = given["actual_seq_lengths"]
        given["actual_seq_lengths"] = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def after_load(ctx):
    each_call(ctx, DRAWN["layer"], change)
