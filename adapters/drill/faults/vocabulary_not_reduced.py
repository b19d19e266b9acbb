"""The parts of the embedding are not summed."""

FAULT = {
    "path": "C",
    "kind": "missing_reduce",
    "checkpoint": "embed",
    "source": "catalogue C: a reduction too few, invisible at TP1",
    "tp": 2,
    "engines": ["vllm"],
    "ranks": [0, 1],
    "draws": {},
}
DRAWN = {}


def apply(ctx):
    if ctx.layout[0] == 1:
        return
    from vllm_ascend.ops.vocab_parallel_embedding import AscendVocabParallelEmbedding

    def forward(self, input_):
        shard = self.shard_indices
        ids, outside = self._get_masked_input_and_mask(
            input_,
            shard.org_vocab_start_index,
            shard.org_vocab_end_index,
            shard.num_org_vocab_padding,
            shard.added_vocab_start_index,
            shard.added_vocab_end_index,
        )
        return self.quant_method.embedding(self, ids.long()).masked_fill_(outside.unsqueeze(-1), 0)

    ctx.replace(AscendVocabParallelEmbedding, "_forward_origin", forward)
