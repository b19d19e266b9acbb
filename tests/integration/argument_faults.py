"""Wrong arguments of attention operators as patch files: what an engine would pass by mistake, in some layers on.

Each engine has its own operators: lmdeploy those of ATB, vLLM fused-infer attention in layout TND.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Of the presets.
LAYERS = 4
_SEAM = '''
"""A wrong argument of attention from layer {layer} on."""

import torch

LAYERS, FIRST = {layers}, {layer}
calls = [0]


def change(name, given):
{change}


def apply(ctx):
    def wrap(owner, name):
        original = getattr(owner, name)

        def wrong(*args, **given):
            # One call for each layer, in warm-up too.
            layer = calls[0] % LAYERS
            calls[0] += 1
            if layer >= FIRST:
                change(name, given)
            return original(*args, **given)

        if hasattr(original, "default"):
            wrong.default = original.default  # torch looks it up there, by name
        ctx.replace(owner, name, wrong)

    if ctx.engine == "vllm":
        import torch_npu

        wrap(torch_npu, "npu_fused_infer_attention_score")
    else:
        wrap(torch.ops.atb, "_npu_flash_attention")
        wrap(torch.ops.atb, "_npu_paged_attention")
'''
FUSED, PREFILL, DECODE = "npu_fused_infer_attention_score", "_npu_flash_attention", "_npu_paged_attention"


@dataclass(frozen=True)
class ArgumentFault:
    """A fault of one engine.

    Attributes:
        change: lines of ``change(name, given)``: what becomes of the call's keyword arguments.
        rule: that must be broken, by ``operator`` in ``phase``.
        layer: from which on.
        model: the preset; both have four layers.
    """

    change: str
    rule: str
    operator: str
    phase: str
    layer: int = 1
    model: str = "qwen3"


_VLLM: Mapping[str, ArgumentFault] = {
    "raw_lengths": ArgumentFault(
        """
ends = given["actual_seq_lengths"]
given["actual_seq_lengths"] = [end - start for start, end in zip([0, *ends], ends)]
""",
        "fa.lengths.q-raw", FUSED, "prefill",
    ),
    "not_cumulative": ArgumentFault(
        """
if given.get("block_table") is None:
    given["actual_seq_lengths"] = [*given["actual_seq_lengths"][-2::-1], given["actual_seq_lengths"][-1]]
""",
        "fa.lengths.q-decreasing", FUSED, "prefill",
    ),
    "mask_transposed": ArgumentFault(
        'given["atten_mask"] = given["atten_mask"].T.contiguous()', "fa.mask.transposed", FUSED, "prefill"
    ),
    "mask_dtype": ArgumentFault('given["atten_mask"] = given["atten_mask"].half()', "fa.mask.dtype", FUSED, "prefill"),
    "scale_omitted": ArgumentFault('given.pop("scale")', "fa.scale.model", FUSED, "prefill", 2),
    # F24 of the catalogue: the scale that most models have, in one whose configuration has another.
    "scale_of_head_dim": ArgumentFault(
        'given["scale"] = given["query"].shape[-1] ** -0.5', "fa.scale.model", FUSED, "prefill", 2, "gemma2"
    ),
    "heads_not_split": ArgumentFault('given["num_heads"] *= 2', "fa.layout.query-heads", FUSED, "prefill"),
    "table_int64": ArgumentFault(
        """
if given.get("block_table") is not None:
    given["block_table"] = given["block_table"].long()
""",
        "fa.paged.table-dtype", FUSED, "decode",
    ),
    "rope_on_one_side": ArgumentFault(
        'given["query_rope"] = given["query"][..., :64].contiguous()', "fa.mla.pair", FUSED, "prefill", 3
    ),
    "decode_without_history": ArgumentFault(
        """
if given.get("block_table") is not None:
    given["actual_seq_lengths_kv"] = [1 for _ in given["actual_seq_lengths_kv"]]
""",
        "fa.lengths.kv-step", FUSED, "decode",
    ),
    # The operator's documentation counts the tokens before the query's own: a window of 100 is 99 of them.
    "window_longer": ArgumentFault(
        """
if given["sparse_mode"] == 4:
    given["pre_tokens"] += 1
""",
        "fa.mask.band-window", FUSED, "prefill", 2, "mistral",
    ),
    "window_ignored": ArgumentFault(
        'given["sparse_mode"] = 3', "fa.mask.window-ignored", FUSED, "prefill", 2, "mistral"
    ),
}  # fmt: skip
_LMDEPLOY: Mapping[str, ArgumentFault] = {
    "raw_lengths": ArgumentFault(
        """
if "seq_len" in given:
    given["seq_len"] = given["seq_len"].cumsum(0).to(torch.int32)
""",
        "fa.lengths.atb-sum", PREFILL, "prefill",
    ),
    "not_cumulative": ArgumentFault(
        """
if "context_lens" in given:
    given["context_lens"] = given["context_lens"].cumsum(0).to(torch.int32)
""",
        "fa.lengths.kv-step", DECODE, "decode",
    ),
    "mask_transposed": ArgumentFault(
        """
if "mask" in given:
    given["mask"] = given["mask"].T.contiguous()
""",
        "fa.mask.transposed", PREFILL, "prefill",
    ),
    "mask_dtype": ArgumentFault(
        """
if "mask" in given:
    given["mask"] = given["mask"].bool()
""",
        "fa.mask.atb-dtype", PREFILL, "prefill",
    ),
    "scale_omitted": ArgumentFault('given["scale_value"] = 1.0', "fa.scale.model", PREFILL, "prefill", 2),
    "scale_of_head_dim": ArgumentFault(
        'given["scale_value"] = given["query"].shape[-1] ** -0.5', "fa.scale.model", PREFILL, "prefill", 2, "gemma2"
    ),
    "heads_not_split": ArgumentFault(
        'given["num_kv_heads"] *= 2', "fa.layout.kv-heads-of-rank", PREFILL, "prefill"
    ),
    "table_int64": ArgumentFault(
        """
if "block_table" in given:
    given["block_table"] = given["block_table"].long()
""",
        "fa.paged.table-dtype", DECODE, "decode",
    ),
    "lengths_int64": ArgumentFault(
        """
if "context_lens" in given:
    given["context_lens"] = given["context_lens"].long()
""",
        "fa.lengths.atb-dtype", DECODE, "decode", 3,
    ),
}  # fmt: skip
FAULTS: Mapping[str, Mapping[str, ArgumentFault]] = {"lmdeploy": _LMDEPLOY, "vllm": _VLLM}


def argument_patch(engine: str, name: str, directory: Path) -> Path:
    """Write the patch of a fault of an engine and return its path."""
    fault = FAULTS[engine][name]
    body = "\n".join(f"    {line}" if line else "" for line in fault.change.strip("\n").split("\n"))
    path = directory / f"{engine}_{name}.py"
    path.write_text(_SEAM.format(layers=LAYERS, layer=fault.layer, change=body), encoding="utf-8")
    return path
