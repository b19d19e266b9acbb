"""Run in a process of its own by test_device.py: call every operator on npu tensors and report as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch_npu
from torch_npu._sim import device, registry

Tensor = torch.Tensor
HALF = torch.float16


def normal(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


HEADS = {"num_heads": 4, "num_kv_heads": 2, "scale_value": 0.2}
FUSED = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.2, "input_layout": "TND"}
TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
CACHES = {"key_cache": normal(3, 16, 2, 32), "value_cache": normal(3, 16, 2, 32)}
ROWS = {"key": normal(3, 2, 32), "value": normal(3, 2, 32)}
PACKED = {"query": normal(3, 4, 32), **ROWS}
PADDED = {"query": normal(2, 1, 4, 32), "key": normal(2, 5, 2, 32), "value": normal(2, 5, 2, 32)}
SINGLE = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.2, "input_layout": "BSND"}

GATING: dict[str, Any] = {"k": 2, "k_group": 1, "group_count": 1, "group_select_mode": 1, "renorm": 1, "norm_type": 0}
GATING |= {"out_flag": True, "routed_scaling_factor": 1.0, "eps": 1e-20}
ROUTED: dict[str, Any] = {
    "expert_idx": ints(1, 0, 3, 1, 0, 2).view(3, 2),
    "expert_num": 4,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
}
GROUPED: dict[str, Any] = {"x": [normal(3, 8)], "weight": [normal(2, 8, 5)], "split_item": 2, "group_type": 0}

CASES: dict[str, dict[str, Any]] = {
    "_C_ascend::get_masked_input_and_mask": {
        "input": torch.arange(9),
        "org_vocab_start_index": 2,
        "org_vocab_end_index": 5,
        "num_org_vocab_padding": 1,
        "added_vocab_start_index": 7,
        "added_vocab_end_index": 8,
    },
    "_C_ascend::moe_gating_top_k": {"x": normal(3, 8), **GATING, "bias_opt": normal(8)},
    "_C_ascend::npu_add_rms_norm_bias": {
        "x1": normal(3, 8),
        "x2": normal(3, 8),
        "gamma": normal(8),
        "beta": normal(8),
    },
    "_C_ascend::npu_gemma_rms_norm": {"x": normal(3, 8), "gamma": normal(8), "epsilon": 1e-5},
    "_C_ascend::npu_moe_init_routing_custom": {"x": normal(3, 8), **ROUTED, "quant_mode": -1},
    "atb::_npu_flash_attention": {
        **PACKED,
        **HEADS,
        "mask": torch.ones(3, 3, dtype=HALF).triu(1),
        "seq_len": ints(2, 1),
        "out": torch.zeros(3, 4, 32, dtype=HALF),
    },
    "atb::_npu_flash_attention_unpad": {
        **PACKED,
        **HEADS,
        "seq_len": ints(2, 1),
        "out": torch.zeros(3, 4, 32, dtype=HALF),
    },
    "atb::_npu_matmul_add_fp32": {
        "x": normal(2, 4),
        "weight": normal(2, 4),
        "C": normal(4, 4, dtype=torch.float32),
    },
    "atb::_npu_paged_attention": {
        "query": normal(2, 4, 32),
        **CACHES,
        **HEADS,
        "block_table": ints(2, 0, 1, 1).view(2, 2),
        "context_lens": ints(20, 3),
        "out": torch.zeros(2, 4, 32, dtype=HALF),
    },
    "atb::_npu_reshape_and_cache": {**ROWS, **CACHES, "slot_indices": ints(40, -1, 3)},
    "atb::_npu_reshape_and_cache_siso": {
        "key": ROWS["key"],
        "key_cache": CACHES["key_cache"],
        "slot_indices": ints(40, -1, 3),
    },
    "atb::_npu_rotary_embedding": {
        "positions": torch.tensor([0, 4, 2]),
        "query": normal(3, 64),
        "key": normal(3, 32),
        "head_size": 32,
        "cos_sin_cache": normal(8, 32),
        "is_neox_style": True,
    },
    "npu::get_npu_format": {"input": normal(2, 2)},
    "npu::npu_add_rms_norm": {"x1": normal(3, 8), "x2": normal(3, 8), "gamma": normal(8)},
    "npu::npu_apply_rotary_pos_emb": {
        "query": normal(1, 3, 4, 64),
        "key": normal(1, 3, 2, 64),
        "cos": normal(1, 3, 1, 64),
        "sin": normal(1, 3, 1, 64),
    },
    "npu::npu_format_cast": {"input": normal(4, 4), "acl_format": 29},
    "npu::npu_format_cast_.acl_format": {"input": normal(4, 4), "acl_format": 29},
    "npu::npu_fused_infer_attention_score": {
        **PACKED,
        **FUSED,
        "atten_mask": TEMPLATE,
        "actual_seq_lengths": [2, 3],
        "actual_seq_lengths_kv": ints(2, 3),
        "sparse_mode": 3,
        "softmax_lse_flag": True,
    },
    "npu::npu_fused_infer_attention_score_v2": {
        **PACKED,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "softmax_scale": 0.2,
        "input_layout": "TND",
        "actual_seq_qlen": ints(2, 3),
        "actual_seq_kvlen": [2, 3],
        "learnable_sink": normal(4),
    },
    "npu::npu_grouped_matmul": {**GROUPED, "group_list": torch.tensor([2, 3])},
    "npu::npu_grouped_matmul.List": {**GROUPED, "group_list": [2, 3]},
    "npu::npu_incre_flash_attention": {**PADDED, **SINGLE, "actual_seq_lengths": [5, 2]},
    "npu::npu_linear": {"input": normal(3, 8), "weight": normal(5, 8), "bias": normal(5)},
    "npu::npu_moe_gating_top_k": {"x": normal(3, 8), "k": 2, "out_flag": True},
    "npu::npu_moe_gating_top_k_softmax": {"x": normal(3, 8), "k": 2},
    "npu::npu_moe_init_routing_v2": {"x": normal(3, 8), **ROUTED},
    "npu::npu_moe_token_permute": {"tokens": normal(3, 8), "indices": ROUTED["expert_idx"]},
    "npu::npu_moe_token_unpermute": {
        "permuted_tokens": normal(6, 8),
        "sorted_indices": ints(5, 0, 2, 1, 4, 3),
        "probs": normal(3, 2),
    },
    "npu::npu_mrope": {
        "positions": torch.tensor([0, 4, 2]),
        "query": normal(3, 64),
        "key": normal(3, 32),
        "cos_sin_cache": normal(8, 32),
        "head_size": 32,
    },
    "npu::npu_prompt_flash_attention": {**PADDED, **SINGLE},
    "npu::npu_rms_norm": {"input": normal(3, 8), "gamma": normal(8), "epsilon": 1e-5},
    "npu::npu_rotary_mul": {"input": normal(2, 3, 4, 8), "r1": normal(2, 3, 1, 8), "r2": normal(2, 3, 1, 8)},
    "npu::npu_scatter_nd_update_": {
        "input": normal(6, 3),
        "indices": torch.tensor([[4], [0]]),
        "updates": normal(2, 3),
    },
    "npu::npu_scatter_pa_kv_cache": {**ROWS, **CACHES, "slot_mapping": ints(40, 7, 3), "cache_mode": "Norm"},
    "npu::npu_silu": {"input": normal(3, 8)},
    "npu::npu_swiglu": {"input": normal(3, 8)},
    "npu::npu_top_k_top_p": {
        "logits": normal(2, 9, dtype=torch.float32),
        "p": torch.tensor([0.5, 0.9]),
        "k": ints(3, 9),
    },
}


def moved(value: Any, device: str) -> Any:
    """A copy, of every tensor of a list too."""
    if isinstance(value, list):
        return [moved(one, device) for one in value]
    return value.clone().to(device) if isinstance(value, Tensor) else value


def clones(given: dict[str, Any]) -> dict[str, Any]:
    return {name: moved(one, "cpu") for name, one in given.items()}


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [] if result is None else [result]


def same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Tensor):
        return bool(ours == theirs)
    return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())


def overload(qualified: str) -> Any:
    namespace, _, name = qualified.partition("::")
    packet, _, which = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")


def compare(qualified: str) -> dict[str, Any]:
    """Call the registered operator on the device and the function on the host, and compare everything."""
    simulated = registry.OPERATORS[qualified]
    on_host = clones(CASES[qualified])
    on_device = {
        name: one if name in simulated.host else moved(one, "npu") for name, one in clones(CASES[qualified]).items()
    }
    expected, result = flat(simulated.function(**on_host)), flat(overload(qualified)(**on_device))
    identical = [
        next((name for name, given in on_device.items() if one is given), None)
        == next((name for name, given in on_host.items() if other is given), None)
        for one, other in zip(result, expected, strict=True)
    ]
    outputs = [one for one in result if isinstance(one, Tensor)]
    arguments = [name for name, one in on_device.items() if isinstance(one, Tensor)]
    return {
        "values": all(same(one, other) for one, other in zip(result, expected, strict=True)),
        "in place": all(same(on_device[name], on_host[name]) for name in arguments),
        "on the device": all(device.is_device(one) for one in outputs),
        "identity": all(identical),
    }


def message(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    """Print one JSON object."""
    cases = sys.argv[1:] or sorted(CASES)
    report: dict[str, Any] = {"cases": sorted(CASES), "compared": {name: compare(name) for name in cases}}
    report["calls"] = {name: registry.calls[name] for name in cases}
    x, gamma = normal(3, 8).to("npu"), normal(8).to("npu")
    packed = {name: one.to("npu") for name, one in PACKED.items()}
    fused = torch.ops.npu.npu_fused_infer_attention_score
    paged = clones(CASES["atb::_npu_paged_attention"])
    paged = {name: one.to("npu") if isinstance(one, Tensor) else one for name, one in paged.items()}
    report["messages"] = {
        "host argument": message(lambda: torch.ops.npu.npu_rms_norm(x, gamma.cpu())),
        "host mask": message(
            lambda: fused(**packed, **FUSED, atten_mask=TEMPLATE, actual_seq_lengths=[3], actual_seq_lengths_kv=[3])
        ),
        "host only": message(lambda: torch.ops.npu.npu_rms_norm(x.cpu(), gamma.cpu())),
        "unsimulated": message(lambda: torch.ops.npu.npu_moe_re_routing(x, x)),
        "unsimulated without tensors": message(lambda: torch.ops.npu.empty_with_format([2, 3])),
        "unsimulated out": message(
            lambda: fused.out(**packed, **FUSED, actual_seq_lengths=[3], actual_seq_lengths_kv=[3], out=[x, x])
        ),
        "lengths on the device": message(lambda: torch.ops.atb._npu_paged_attention(**paged)),
        "check": message(lambda: torch.ops.npu.npu_swiglu(x[:, :7])),
    }
    library_class: Any = torch.library.Library
    later = library_class("_C_ascend", "FRAGMENT")
    report["redefined"] = later.define("npu_add_rms_norm_bias(Tensor x) -> Tensor")
    report["defined"] = later.define("invented_by_a_test(Tensor x) -> Tensor")
    later.impl("npu_add_rms_norm_bias", lambda *args, **kwargs: None, "Meta")
    registry.install(device)
    attributes = registry.python_attributes()
    report["attributes"] = {
        name: name in attributes
        for name in ("npu_swiglu", "_npu_rotary_embedding", "npu_moe_re_routing", "get_masked_input_and_mask")
    }
    report["attributes"]["empty_with_format"] = "empty_with_format" in attributes
    report["same"] = torch_npu.npu_swiglu is torch.ops.npu.npu_swiglu
    report["keywords"] = same(
        torch_npu.npu_rms_norm(input=x, gamma=gamma, epsilon=1e-5)[0],
        torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0],
    )
    print(json.dumps(report))


main()
