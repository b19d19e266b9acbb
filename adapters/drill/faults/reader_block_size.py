"""Attention takes blocks for half as large as they are."""

import torch

from adapters.drill.places import operator

FAULT = {
    "path": "A",
    "kind": "reader_block_size",
    "step": 1,
    "request": 0,
    "source": "catalogue A-36",
}
DRAWN = {}


def apply(ctx):
    if ctx.engine == "lmdeploy":
        return
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

    original = AscendAttentionBackendImpl._get_fia_params

    def halved(self, *args, **kwargs):
        key, value, size, tables, lengths = original(self, *args, **kwargs)
        if tables is not None:
            size //= 2
            key, value = (one.view(-1, size, one.shape[-1]) for one in (key, value))
            tables = torch.cat([tables, tables * 0], 1)
        return key, value, size, tables, lengths

    ctx.replace(AscendAttentionBackendImpl, "_get_fia_params", halved)


def after_load(ctx):
    if ctx.engine == "vllm":
        return
    for layer in range(len(ctx.model.model.layers)):
        owner = operator(ctx, layer, "attention")
        ctx.replace(owner, "paged_attention_fwd", halved_reader(owner.paged_attention_fwd))


def halved_reader(original):
    def halved(query, key, value, output, k_cache, v_cache, tables, *args, is_decoding, block_size, **kwargs):
        if is_decoding:
            block_size //= 2
            k_cache, v_cache = (one.view(-1, block_size, *one.shape[2:]) for one in (k_cache, v_cache))
            tables = torch.cat([tables, tables * 0], 1)
        given = {"is_decoding": is_decoding, "block_size": block_size, **kwargs}
        return original(query, key, value, output, k_cache, v_cache, tables, *args, **given)

    return halved
