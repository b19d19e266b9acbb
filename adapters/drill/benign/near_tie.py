"""Where a router's second and third logit are one unit in the last place apart, or none, they change places.

Another right kernel may have it so.
"""


def apply(ctx):
    pass


def after_load(ctx):
    gate = ctx.model.model.layers[1].mlp.gate
    owner = getattr(gate, "impl", gate)
    original = owner.forward

    def forward(x, *args, **kwargs):
        result = original(x, *args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        rows = out.view(-1, out.shape[-1])
        value, place = rows.topk(3, -1)
        unit = value[:, 1].abs().float() * 2.0**-7
        near = (value[:, 1] - value[:, 2]).float() <= unit
        for row in near.nonzero()[:, 0].tolist():
            second, third = place[row, 1:].tolist()
            rows[row, third] = value[row, 1]
            rows[row, second] = value[row, 1] - unit[row].to(rows.dtype)
        return result

    ctx.replace(owner, "forward", forward)
