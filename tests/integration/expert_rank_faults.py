"""Faults of experts on several ranks: patches, and what must be said of each; worked out before it was run.

Each patch is one text for both engines. It acts where the real fault would, with more than one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

#: F20: the shared experts' result is reduced by itself, and again with the routed experts'. Behind the tap of
#: down_proj, so that its own result is right.
_SHARED = """
def apply(ctx):
    pass


def after_load(ctx):
    if ctx.layout[0] == 1:
        return
    block = ctx.model.model.layers[1].mlp

    def reduced(result):
        if ctx.engine == "lmdeploy":
            import lmdeploy.pytorch.distributed as dist

            total = result.clone()
            dist.all_reduce(total)
            return total
        from vllm.distributed import tensor_model_parallel_all_reduce

        return tensor_model_parallel_all_reduce(result.clone())

    if ctx.engine == "lmdeploy":
        original = block.shared_expert.forward
        ctx.replace(block.shared_expert, "forward", lambda x: reduced(original(x)))
        return
    part = block.experts._shared_experts_part2
    ctx.replace(block.experts, "_shared_experts_part2", lambda *args: reduced(part(*args)))
"""


@dataclass(frozen=True)
class ExpertFault:
    """A patch and what must be said of it.

    Attributes:
        source: of the patch.
        model, layout: of the run, the latter as options.
        kind, checkpoint, ranks: of the first finding.
        numbers: what the evidence says of it.
    """

    source: str
    kind: str
    checkpoint: str
    ranks: tuple[int, ...] = (0, 1)
    model: str = "qwen2-moe"
    layout: tuple[str, ...] = ("--tp", "2")
    numbers: dict[str, object] = field(default_factory=dict)


EXPERT_FAULTS = {
    "shared_twice": ExpertFault(
        _SHARED, "doubled_reduce", "layers.1.moe.out", numbers={"ratio": 2.0, "part": "shared"}
    ),
}  # fmt: skip


def expert_patch(name: str, directory: Path) -> Path:
    """The patch file of a fault."""
    path = directory / f"{name}.py"
    path.write_text(EXPERT_FAULTS[name].source, encoding="utf-8")
    return path
