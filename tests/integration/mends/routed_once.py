"""The routed result of qwen2_moe is added up once where the ranks of a group hold all of it already.

File: lmdeploy/pytorch/models/qwen2_moe.py
Change: with expert parallelism only the shared experts' result is reduced over the tensor-parallel ranks
Reason: behind the exchange of tokens (moe_finalize of dlinfer) each rank holds all of it; another reduce adds it again
"""


def apply(ctx):
    import lmdeploy.pytorch.distributed as dist
    from lmdeploy.pytorch.models.qwen2_moe import Qwen2MoeSparseMoeBlock as Block
    from torch.nn.functional import sigmoid

    original = Block.forward

    def forward(self, hidden_states):
        if not self._all_reduce or self.experts.ep_size == 1:
            return original(self, hidden_states)
        rows = hidden_states.flatten(0, -2)
        weights, ids = self.softmax_topk(self.gate(rows))
        routed = self.experts(rows, weights, ids)
        shared = sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        dist.all_reduce(shared)
        return (routed + shared).view(hidden_states.shape)

    ctx.replace(Block, "forward", forward)
