"""The sum of a projection that all data-parallel groups share is scattered to the groups.

File: lmdeploy/pytorch/backends/dlinfer/linear.py
Change: DlinferLinearImpl.forward scatters the sum where it is given scatter_size, as backends/default/linear.py does
Reason: it ignores rank and scatter_size, and every rank keeps the sums of all groups' tokens
"""


def apply(ctx):
    from lmdeploy.pytorch.backends.dlinfer.linear import DlinferLinearImpl as Linear
    from lmdeploy.pytorch.distributed import reduce_scatter_by_tp_sizes

    original = Linear.forward

    def forward(self, x, weight, bias=None, all_reduce=False, group=None, rank=0, scatter_size=None):
        if not all_reduce or scatter_size is None:
            return original(self, x, weight, bias, all_reduce, group)
        out = original(self, x, weight, bias)
        return reduce_scatter_by_tp_sizes(out, rank, scatter_size, group=group)

    ctx.replace(Linear, "forward", forward)
