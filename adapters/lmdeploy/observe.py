"""What lmdeploy's worker really runs, read from its live model agent.

The hooks call these in every worker: :func:`worker_facts` once the cache is built and any warm-up is over,
:func:`start_facts` then too or at the first real step, :func:`sampling_facts` at the first real step of each run.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from adapters.base import Observation
from adapters.lmdeploy.experts import placement
from adapters.probe import model_facts
from adapters.probe.live import Facts, one_or_all
from adapters.probe.parallel_code import talking


def _model(agent: Any) -> Any:
    """The causal language model below the graph runner, if that is built already."""
    model = agent.patched_model
    return model.get_model() if hasattr(model, "get_model") else model


def _attention_modules(model: torch.nn.Module) -> list[Any]:
    """The modules of all attentions, by layer."""
    found = ((module, getattr(module, "impl", None)) for module in model.modules())
    return [module for module, impl in found if hasattr(impl, "num_kv_heads") and hasattr(impl, "scale")]


def _attentions(model: torch.nn.Module) -> list[Any]:
    """The implementations of all attentions, by layer."""
    return [module.impl for module in _attention_modules(model)]


def _kernel_takes(impl: Any, *names: str) -> bool:
    """Whether the kernel that an attention calls has such an argument: what it does not take it cannot apply."""
    return any(name in inspect.signature(impl.paged_attention_fwd).parameters for name in names)


def _windows(attentions: list[Any]) -> Any:
    # dlinfer's kernels take no window, whatever the layer was built with (lmdeploy 0.12.2, kernels/dlinfer).
    kernels = [
        max(0, impl.sliding_window or 0) if _kernel_takes(impl, "sliding_window", "window_size") else 0
        for impl in attentions
    ]
    return one_or_all(kernels)


def _rotary(model: torch.nn.Module) -> Any:
    found = [module for module in model_facts.named(model, "Rotary") if hasattr(module, "inv_freq")]
    if len({id(module) for module in found}) != 1:
        raise LookupError(f"{len(found)} rotary embeddings with inverse frequencies, not one")
    return found[0]


def _frequencies(rotary: Any) -> dict[str, Any]:
    """Asks the module itself, in float32, so that whatever it does to its frequencies is seen."""
    device = rotary.inv_freq.device
    positions = torch.arange(model_facts.ROPE_POSITIONS, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return model_facts.measured_frequencies(cos[0, :, :half], sin[0, :, :half])


def worker_facts(agent: Any) -> list[Observation]:
    """Facts of one rank.

    Args:
        agent: lmdeploy's ``BaseModelAgent`` after ``build_cache_engine`` (and ``warmup``, which may be left out).
    """
    facts = Facts()
    with torch.inference_mode():
        _layout_facts(facts, agent)
        _norm_and_rope_facts(facts, agent)
        _attention_facts(facts, agent)
        _size_facts(facts, agent)
        _cache_facts(facts, agent)
        _routing_facts(facts, agent)
    return facts.found


def _layout_facts(facts: Facts, agent: Any) -> None:
    facts.read("worker_tp", "agent.dist_config.attn_tp", lambda: int(agent.dist_config.attn_tp))
    facts.read("worker_dp", "agent.dist_config.dp", lambda: int(agent.dist_config.dp))
    facts.read("worker_dp_rank", "agent.dist_config.dp_rank", lambda: int(agent.dist_config.dp_rank))
    facts.read("worker_ep", "agent.dist_config.ep", lambda: int(agent.dist_config.ep))
    facts.read("worker_eager", "agent.backend_config.eager_mode", lambda: bool(agent.backend_config.eager_mode))
    facts.read("graph_runner", "type of agent.patched_model", lambda: type(agent.patched_model).__name__)

    facts.read("parallel_code", "functions that call a collective", lambda: talking(_PARALLEL_CODE))

    def skipped() -> bool:
        from lmdeploy.pytorch import envs

        return bool(envs.skip_warmup)

    facts.read("warmup_skipped", "lmdeploy.pytorch.envs.skip_warmup", skipped)


#: Where dlinfer patches lmdeploy's distributed behaviour for a vendor, and lmdeploy's own side of it.
_PARALLEL_CODE = ("dlinfer.framework.lmdeploy_ext.device", "lmdeploy.pytorch.backends.dlinfer")


def _norm_and_rope_facts(facts: Facts, agent: Any) -> None:
    facts.read(
        "norm_eps",
        "impl.eps of every RMSNorm",
        lambda: one_or_all(float(module.impl.eps) for module in model_facts.named(_model(agent), "RMSNorm")),
    )
    facts.read(
        "norm_eps_unlike",
        "impl.eps of every RMSNorm",
        lambda: model_facts.unlike(
            _model(agent), ((one, float(one.impl.eps)) for one in model_facts.named(_model(agent), "RMSNorm"))
        ),
    )
    facts.read("rope_theta", "base of the rotary embedding", lambda: float(_rotary(_model(agent)).base))
    facts.read("rotary_dim", "inv_freq of the rotary embedding", lambda: 2 * _rotary(_model(agent)).inv_freq.numel())

    def scaling() -> str:
        rotary = _rotary(_model(agent))
        return model_facts.rope_type(rotary, float(rotary.scaling_factor))

    facts.read("rope_scaling", "class and scaling_factor of the rotary embedding", scaling)
    facts.read(
        "rope_frequencies",
        "cosines and sines that the rotary embedding computes",
        lambda: _frequencies(_rotary(_model(agent))),
    )


def _attention_facts(facts: Facts, agent: Any) -> None:
    def attentions() -> list[Any]:
        return _attentions(_model(agent))

    def tp() -> int:
        return int(agent.dist_config.attn_tp)

    def replicas() -> int:
        return int(getattr(agent.model_config.hf_config, "num_replicate_key_value_heads", 1))

    facts.read("heads_local", "impl.num_heads", lambda: one_or_all(impl.num_heads for impl in attentions()))
    facts.read("heads", "impl.num_heads × tp", lambda: one_or_all(impl.num_heads * tp() for impl in attentions()))
    facts.read(
        "kv_heads",
        "impl.num_kv_heads × tp ÷ replicas",
        lambda: one_or_all(impl.num_kv_heads * tp() // replicas() for impl in attentions()),
    )
    facts.read("head_dim", "impl.head_size", lambda: one_or_all(impl.head_size for impl in attentions()))
    facts.read("attention_scale", "impl.scale", lambda: one_or_all(float(impl.scale) for impl in attentions()))
    facts.read(
        "attention_scale_unlike",
        "impl.scale",
        lambda: model_facts.unlike(
            _model(agent), ((one, float(one.impl.scale)) for one in _attention_modules(_model(agent)))
        ),
    )
    facts.read("window", "what impl.paged_attention_fwd takes", lambda: _windows(attentions()))
    facts.read(
        "window_declared",
        "impl.sliding_window",
        lambda: one_or_all(max(0, impl.sliding_window or 0) for impl in attentions()),
    )
    facts.read(
        "window_cache", "agent.cache_config.window_size", lambda: max(0, int(agent.cache_config.window_size or 0))
    )
    facts.read(
        "softcap",
        "what impl.paged_attention_fwd takes",
        lambda: one_or_all(
            float(impl.logit_softcapping or 0.0) if _kernel_takes(impl, "logit_softcapping", "softcap") else 0.0
            for impl in attentions()
        ),
    )


def _rows(embedding: Any) -> int:
    """Of the whole table: lmdeploy's own embedding says it, where a model uses torch's it is not split."""
    return int(embedding.vocab_size if hasattr(embedding, "vocab_size") else embedding.num_embeddings)


def _experts(model: Any) -> list[Any]:
    """The fused expert layers."""
    return [
        module
        for module in model.modules()
        if hasattr(getattr(module, "impl", None), "num_experts") and hasattr(module.impl, "top_k")
    ]


def _size_facts(facts: Facts, agent: Any) -> None:
    def embedding() -> Any:
        return _model(agent).get_input_embeddings()

    def intermediate() -> Any:
        merged = [
            module
            for name, module in _model(agent).named_modules()
            if name.endswith("gate_up_proj") and "experts" not in name
        ]
        width = one_or_all(int(module.weight.shape[0]) * int(module.tp) // 2 for module in merged)
        experts = _experts(_model(agent))
        if not experts:
            return width
        return {"expert": one_or_all(int(one.ffn_dim) * int(one.tp) for one in experts), "shared": width or 0}

    facts.read("layers", "attentions of the model", lambda: len(_attentions(_model(agent))) or None)
    facts.read("vocab", "rows of embed_tokens before they are split", lambda: _rows(embedding()))
    facts.read("hidden", "shape of embed_tokens.weight", lambda: int(embedding().weight.shape[1]))
    facts.read("intermediate", "shape of gate_up_proj.weight × tp, ffn_dim × tp of experts", intermediate)
    facts.read(
        "tied_head",
        "storage of lm_head.weight and embed_tokens.weight",
        lambda: model_facts.tied_head(_model(agent), embedding().weight),
    )
    facts.read("parameter_dtype", "dtype of every parameter", lambda: model_facts.parameter_dtypes(_model(agent)))


def _cache_facts(facts: Facts, agent: Any) -> None:
    def keys() -> list[torch.Tensor]:
        return [layer[0] for layer in agent.cache_engine.gpu_cache]

    facts.read(
        "cache_dtype",
        "dtype of cache_engine.gpu_cache",
        lambda: one_or_all(
            model_facts.dtype_name(t.dtype) for t in model_facts.flat_caches(agent.cache_engine.gpu_cache)
        ),
    )
    facts.read(
        "cache_block_size",
        "shape of cache_engine.gpu_cache [blocks, block_size, kv_heads, head_dim]",
        lambda: one_or_all(int(key.shape[1]) for key in keys()),
    )
    facts.read("cache_shape", "shape of the keys of layer 0", lambda: list(keys()[0].shape))
    facts.read(
        "cache_residue",
        "elements of cache_engine.gpu_cache",
        lambda: model_facts.residue(agent.cache_engine.gpu_cache),
    )


def _routing_facts(facts: Facts, agent: Any) -> None:
    """Only of models with experts."""
    layers = _experts(_model(agent))
    experts = [one.impl for one in layers]
    if not experts:
        return
    facts.read(
        "expert_placement",
        "expert_list of every fused expert layer",
        lambda: model_facts.placed(map(placement, layers), int(agent.dist_ctx.ep_rank)),
    )
    facts.read(
        "routing",
        "impl of every fused expert layer",
        lambda: {
            "experts": one_or_all(int(impl.num_experts) for impl in experts),
            "top_k": one_or_all(int(impl.top_k) for impl in experts),
            "renormalize": one_or_all(bool(impl.renormalize) for impl in experts),
        },
    )


def start_facts(agent: Any, directory: Path, rank: int) -> list[Observation]:
    """What the cache holds, and how many dummy forwards were logged, when all warm-up is over."""
    facts = Facts()
    with torch.inference_mode():
        facts.read(
            "start_residue",
            "elements of cache_engine.gpu_cache before the first real step",
            lambda: model_facts.residue(agent.cache_engine.gpu_cache),
        )
    facts.read("dummy_forwards", "the worker's step log", lambda: model_facts.dummy_forwards(directory, rank))
    return facts.found


def sampling_facts(sampling_inputs: Any) -> list[Observation]:
    """How the rows of a batch are sampled.

    Args:
        sampling_inputs: lmdeploy's ``SamplingInputs``, whose fields are ``None`` or have one element per row.
    """
    facts = Facts()

    def values(name: str, absent: Any) -> Any:
        tensor = getattr(sampling_inputs, name)
        return absent if tensor is None else one_or_all(tensor.flatten().tolist())

    # lmdeploy 0.12.2, FusedLogitsProcessor.sampling: argmax if and only if the largest top_k is 1.
    facts.read("greedy", "SamplingInputs.max_top_k", lambda: int(sampling_inputs.max_top_k) == 1)
    facts.read("top_k", "SamplingInputs.top_k", lambda: values("top_k", int(sampling_inputs.max_top_k)))
    facts.read("temperature", "SamplingInputs.temperature", lambda: values("temperature", 1.0))
    facts.read("top_p", "SamplingInputs.top_p", lambda: values("top_p", 1.0))
    facts.read("penalties", "SamplingInputs.repetition_penalty", lambda: values("repetition_penalty", 1.0) != 1.0)
    return facts.found
