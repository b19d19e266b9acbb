"""What vllm-ascend's worker really runs, read from its live model runner.

The hooks call these in every worker: :func:`worker_facts` after ``initialize_kv_cache``, :func:`start_facts` then too
or at the first real step, :func:`sampling_facts` at the first real step of each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from adapters.base import Observation
from adapters.probe import model_facts
from adapters.probe.live import Facts, one_or_all
from adapters.probe.parallel_code import talking
from adapters.vllm.experts import placement

#: Switches of vllm-ascend that change which kernels run or what a rank holds.
ASCEND_SWITCHES = (
    "weight_nz_mode",
    "enable_mlapo",
    "enable_flashcomm1",
    "enable_fused_mc2",
    "enable_matmul_allreduce",
    "enable_shared_expert_dp",
    "multistream_overlap_shared_expert",
)


def _attentions(model: torch.nn.Module) -> list[Any]:
    """The attention layers, in order."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "impl") and hasattr(module, "num_kv_heads") and hasattr(module, "head_size")
    ]


def _rotary(model: torch.nn.Module) -> Any:
    """The rotary embedding, which vLLM shares between layers of equal parameters."""
    found = {id(module): module for module in model_facts.named(model, "Rotary") if hasattr(module, "cos_sin_cache")}
    if len(found) != 1:
        raise LookupError(f"{len(found)} rotary embeddings with a table, not one")
    return next(iter(found.values()))


def _frequencies(rotary: Any) -> dict[str, Any]:
    table = rotary.cos_sin_cache[: model_facts.ROPE_POSITIONS]
    cos, sin = table.chunk(2, dim=-1)
    return model_facts.measured_frequencies(cos, sin)


def worker_facts(runner: Any) -> list[Observation]:
    """Facts of one rank.

    Args:
        runner: vllm-ascend's ``NPUModelRunner`` after ``initialize_kv_cache``.
    """
    facts = Facts()
    with torch.inference_mode():
        _layout_facts(facts, runner)
        _norm_and_rope_facts(facts, runner)
        _attention_facts(facts, runner)
        _size_facts(facts, runner)
        _cache_facts(facts, runner)
        _routing_facts(facts, runner)
    return facts.found


#: The plugin's groups and communicators, and what they are built on.
_PARALLEL_CODE = ("vllm_ascend.distributed", "vllm.distributed.device_communicators.base_device_communicator")


def _layout_facts(facts: Facts, runner: Any) -> None:
    def groups() -> Any:
        from vllm.distributed import parallel_state

        return parallel_state

    config = runner.vllm_config
    facts.read("parallel_code", "functions that call a collective", lambda: talking(_PARALLEL_CODE))
    facts.read("worker_tp", "world size of the tp group", lambda: int(groups().get_tp_group().world_size))
    facts.read("worker_dp", "world size of the dp group", lambda: int(groups().get_dp_group().world_size))
    facts.read(
        "worker_dp_rank",
        "parallel_config.data_parallel_index",
        lambda: int(config.parallel_config.data_parallel_index),
    )
    facts.read(
        "worker_ep",
        "world size of the ep group",
        lambda: int(groups().get_ep_group().world_size) if config.parallel_config.enable_expert_parallel else 1,
    )
    facts.read(
        "worker_eager",
        "model_config.enforce_eager and compilation_config of the worker",
        lambda: (
            bool(config.model_config.enforce_eager)
            and int(config.compilation_config.mode) == 0
            and config.compilation_config.cudagraph_mode.name == "NONE"
        ),
    )
    facts.read("custom_ops", "compilation_config.custom_ops", lambda: list(config.compilation_config.custom_ops))

    def switches() -> dict[str, Any]:
        from vllm_ascend.ascend_config import get_ascend_config

        live = get_ascend_config()
        return {name: getattr(live, name, "not there") for name in ASCEND_SWITCHES}

    facts.read("ascend_config", "vllm_ascend.ascend_config.get_ascend_config()", switches)


def _norm_and_rope_facts(facts: Facts, runner: Any) -> None:
    model = runner.get_model()
    facts.read(
        "norm_eps",
        "variance_epsilon of every RMSNorm",
        lambda: one_or_all(float(module.variance_epsilon) for module in model_facts.named(model, "RMSNorm")),
    )
    facts.read(
        "norm_eps_unlike",
        "variance_epsilon of every RMSNorm",
        lambda: model_facts.unlike(
            model, ((one, float(one.variance_epsilon)) for one in model_facts.named(model, "RMSNorm"))
        ),
    )
    facts.read("rope_theta", "base of the rotary embedding", lambda: float(_rotary(model).base))
    facts.read(
        "rotary_dim", "cos_sin_cache of the rotary embedding", lambda: int(_rotary(model).cos_sin_cache.shape[1])
    )
    facts.read(
        "rope_scaling",
        "class of the rotary embedding",
        lambda: model_facts.rope_type(_rotary(model), float(getattr(_rotary(model), "scaling_factor", 1.0))),
    )
    facts.read("rope_frequencies", "cos_sin_cache of the rotary embedding", lambda: _frequencies(_rotary(model)))


def _attention_facts(facts: Facts, runner: Any) -> None:
    model = runner.get_model()

    def tp() -> int:
        from vllm.distributed import get_tensor_model_parallel_world_size

        return int(get_tensor_model_parallel_world_size())

    def replicas() -> int:
        found = [int(m.num_kv_head_replicas) for m in model.modules() if hasattr(m, "num_kv_head_replicas")]
        return found[0] if found else 1

    facts.read("heads_local", "attn.impl.num_heads", lambda: one_or_all(a.impl.num_heads for a in _attentions(model)))
    facts.read(
        "heads", "attn.impl.num_heads × tp", lambda: one_or_all(a.impl.num_heads * tp() for a in _attentions(model))
    )
    facts.read(
        "kv_heads",
        "attn.impl.num_kv_heads × tp ÷ replicas",
        lambda: one_or_all(a.impl.num_kv_heads * tp() // replicas() for a in _attentions(model)),
    )
    facts.read("head_dim", "attn.impl.head_size", lambda: one_or_all(a.impl.head_size for a in _attentions(model)))
    facts.read(
        "attention_scale", "attn.impl.scale", lambda: one_or_all(float(a.impl.scale) for a in _attentions(model))
    )
    facts.read(
        "attention_scale_unlike",
        "attn.impl.scale",
        lambda: model_facts.unlike(model, ((one, float(one.impl.scale)) for one in _attentions(model))),
    )
    facts.read(
        "window", "attn.impl.sliding_window", lambda: one_or_all(a.impl.sliding_window or 0 for a in _attentions(model))
    )
    # vllm-ascend's GQA implementation drops the softcap that it is built with.
    facts.read(
        "softcap",
        "attn.impl.logits_soft_cap, which vllm-ascend does not keep",
        lambda: one_or_all(float(getattr(a.impl, "logits_soft_cap", None) or 0.0) for a in _attentions(model)),
    )


def _experts(model: Any) -> list[Any]:
    """The fused expert layers."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "top_k") and hasattr(module, "renormalize") and hasattr(module, "global_num_experts")
    ]


def _size_facts(facts: Facts, runner: Any) -> None:
    model = runner.get_model()

    def embedding() -> Any:
        return next(module for name, module in model.named_modules() if name.endswith("embed_tokens"))

    def intermediate() -> Any:
        merged = [
            module for name, module in model.named_modules() if name.endswith("gate_up_proj") and "experts" not in name
        ]
        width = one_or_all(int(module.weight.shape[0]) * int(module.tp_size) // 2 for module in merged)
        experts = _experts(model)
        if not experts:
            return width
        # [experts, intermediate, hidden] since the weights were transposed after loading.
        widths = (int(one.w2_weight.shape[1]) * int(one.tp_size) for one in experts)
        return {"expert": one_or_all(widths), "shared": width or 0}

    facts.read("layers", "attention layers of the model", lambda: len(_attentions(model)) or None)
    facts.read("vocab", "embed_tokens.org_vocab_size", lambda: int(embedding().org_vocab_size))
    facts.read("hidden", "shape of embed_tokens.weight", lambda: int(embedding().weight.shape[1]))
    facts.read("intermediate", "shape of gate_up_proj.weight × tp, of w2_weight × tp of experts", intermediate)
    facts.read(
        "tied_head",
        "storage of lm_head.weight and embed_tokens.weight",
        lambda: model_facts.tied_head(model, embedding().weight),
    )
    facts.read("parameter_dtype", "dtype of every parameter", lambda: model_facts.parameter_dtypes(model))


def _cache_facts(facts: Facts, runner: Any) -> None:
    def tensors() -> list[torch.Tensor]:
        return list(model_facts.flat_caches(runner.kv_caches))

    facts.read(
        "cache_dtype",
        "dtype of runner.kv_caches",
        lambda: one_or_all(model_facts.dtype_name(tensor.dtype) for tensor in tensors()),
    )
    facts.read(
        "cache_block_size",
        "shape of runner.kv_caches [blocks, block_size, kv_heads, head_dim]",
        lambda: one_or_all(int(tensor.shape[1]) for tensor in tensors()),
    )
    facts.read("cache_shape", "shape of the keys of layer 0", lambda: list(tensors()[0].shape))
    facts.read("cache_residue", "elements of runner.kv_caches", lambda: model_facts.residue(runner.kv_caches))


def _routing_facts(facts: Facts, runner: Any) -> None:
    """Only of models with experts."""
    experts = _experts(runner.get_model())
    if not experts:
        return
    facts.read(
        "routing",
        "every fused expert layer",
        lambda: {
            "experts": one_or_all(int(module.global_num_experts) for module in experts),
            "top_k": one_or_all(int(module.top_k) for module in experts),
            "renormalize": one_or_all(bool(module.renormalize) for module in experts),
        },
    )
    facts.read(
        "expert_placement",
        "_expert_map of every fused expert layer",
        lambda: model_facts.placed(map(placement, experts), int(experts[0].ep_rank)),
    )


def start_facts(runner: Any, directory: Path, rank: int) -> list[Observation]:
    """What the cache holds, and how many dummy forwards were logged, when all warm-up is over."""
    facts = Facts()
    with torch.inference_mode():
        facts.read(
            "start_residue",
            "elements of runner.kv_caches before the first real step",
            lambda: model_facts.residue(runner.kv_caches),
        )
    facts.read("dummy_forwards", "the worker's step log", lambda: model_facts.dummy_forwards(directory, rank))
    return facts.found


def sampling_facts(metadata: Any) -> list[Observation]:
    """How the rows of a batch are sampled.

    Args:
        metadata: vLLM's ``SamplingMetadata``, ``runner.input_batch.sampling_metadata`` when sampling.
    """
    facts = Facts()

    def values(name: str, absent: Any) -> Any:
        tensor = getattr(metadata, name)
        return absent if tensor is None else one_or_all(tensor.flatten().tolist())

    facts.read("greedy", "SamplingMetadata.all_greedy", lambda: bool(metadata.all_greedy))
    # Without a greedy exception all rows are drawn; with it neither temperature nor top_k is looked at.
    facts.read("temperature", "SamplingMetadata.temperature", lambda: values("temperature", 0.0))
    facts.read("top_k", "SamplingMetadata.top_k", lambda: values("top_k", 0))
    facts.read("top_p", "SamplingMetadata.top_p", lambda: values("top_p", 1.0))
    facts.read("penalties", "SamplingMetadata.no_penalties", lambda: not metadata.no_penalties)
    return facts.found
