"""The residual is added before the norm and not by its operator, which rounds in between."""


def apply(ctx):
    if ctx.engine == "lmdeploy":
        from lmdeploy.pytorch.backends.dlinfer.norm import DlinferRMSNormImpl

        original = DlinferRMSNormImpl.forward

        def apart(self, x, weight, residual=None):
            if residual is None:
                return original(self, x, weight)
            residual = x + residual
            return original(self, residual, weight), residual

        ctx.replace(DlinferRMSNormImpl, "forward", apart)
        return
    from vllm_ascend.ops.layernorm import AscendRMSNorm

    original = AscendRMSNorm.forward_oot

    def apart(self, x, residual=None):
        if residual is None:
            return original(self, x)
        residual = x + residual
        return original(self, residual), residual

    ctx.replace(AscendRMSNorm, "forward_oot", apart)
