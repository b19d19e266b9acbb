"""A model, a case, and what two right engines say about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.base import Observation, RowSpan, StepRecord
from align.case.schema import Case, CaseRequest
from align.checkpoints.table import Structure, structure_of
from align.conditions import Condition, SideFacts, evaluate
from align.models.info import ModelInfo

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
CASE = Case(
    model="tiny",
    requests=(CaseRequest(name="r0", token_ids=(1, 2, 3, 4)), CaseRequest(name="r1", token_ids=(5, 6))),
)
IDS = {request.name: request.token_ids for request in CASE.requests}
FILES = {"model.safetensors": "aa", "config.json": "bb"}
FREQUENCIES = [10000.0 ** (-index / 16) for index in range(0, 16, 2)]
WHOLE = (StepRecord(0, "prefill", (RowSpan("r0", 0, 4), RowSpan("r1", 0, 2)), {}),)

_BOTH: dict[str, Any] = {
    "soc_version": 223,
    "cache_residue": {"elements": 0, "blocks": 0, "of_blocks": 8},
    "start_residue": {"elements": 0, "blocks": 0, "of_blocks": 8},
    "dummy_forwards": 0,
    "eager": True,
    "worker_eager": True,
    "tp": 1,
    "worker_tp": 1,
    "dp": 1,
    "worker_dp": 1,
    "worker_ep": 1,
    "greedy": True,
    "temperature": 1.0,
    "top_k": 1,
    "penalties": False,
    "dtype": "bfloat16",
    "parameter_dtype": "bfloat16",
    "cache_dtype": "bfloat16",
    "block_size": 128,
    "cache_block_size": 128,
    "prefix_caching": False,
    "max_prefill_tokens": 128,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": "default",
    "rope_frequencies": {"inv_freq": FREQUENCIES, "resolution": [1e-6] * 8, "scale": 1.0, "positions": 64},
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "attention_scale": 0.25,
    "window": 0,
    "softcap": 0.0,
    "tied_head": False,
    "layers": 2,
    "vocab": 128,
    "hidden": 64,
    "intermediate": 96,
    "numerics": "native",
}
FACTS: dict[str, dict[str, Any]] = {
    "lmdeploy": {
        **_BOTH,
        "warmup_skipped": True,
        "chunked_prefill": "no such mode",
        "async_scheduling": "no such mode",
        "window_cache": 0,
    },
    "vllm": {
        **_BOTH,
        "dummy_forwards": 1,
        "temperature": 0.0,
        "top_k": 0,
        "chunked_prefill": False,
        "async_scheduling": False,
        "ascend_config": {"weight_nz_mode": 0, "enable_mlapo": False, "enable_flashcomm1": "not there"},
    },
}

RESIDUE = {"elements": 7, "blocks": 1, "of_blocks": 8}
#: Condition → facts that make it false; every condition of the table is here or in a test of its own.
FALSE: dict[str, dict[str, Any]] = {
    "warmup": {"start_residue": RESIDUE},
    "eager": {"worker_eager": False},
    "tp": {"worker_tp": 2},
    "dp": {"dp": 2},
    "ep": {"worker_ep": 2},
    "greedy": {"greedy": False, "top_k": 5},
    "dtype": {"cache_dtype": "float16"},
    "block_size": {"cache_block_size": 64},
    "prefix_caching": {"prefix_caching": True},
    "chunked_prefill": {"max_prefill_tokens": 5},
    "async_scheduling": {"async_scheduling": True},
    "norm_eps": {"norm_eps": 1e-3},
    "rope_theta": {"rope_theta": 10001.0},
    "rope_scaling": {"rope_scaling": "linear"},
    "rope_frequencies": {
        "rope_frequencies": {
            "inv_freq": [1.0 / 2**index for index in range(8)], "resolution": [1e-6] * 8, "scale": 1.0,
        }
    },
    "heads": {"heads": 8},
    "kv_heads": {"kv_heads": 4},
    "head_dim": {"head_dim": 32},
    "attention_scale": {"attention_scale": 0.125},
    "window": {"window": 4},
    "softcap": {"softcap": 30.0},
    "tied_head": {"tied_head": True},
    "layers": {"layers": 3},
    "vocab": {"vocab": 256},
    "hidden": {"hidden": 32},
    "intermediate": {"intermediate": 97},
}  # fmt: skip


def info(config: Mapping[str, Any] = CONFIG) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        path=Path("/nowhere"),
        preset=False,
        config=config,
        vocab_size=128,
        max_positions=512,
        heads=4,
        kv_heads=2,
        head_dim=16,
        layers=2,
        hidden=64,
        intermediate=96,
        bos_id=None,
        eos_ids=(),
        fingerprint="0" * 16,
    )


def side(engine: str, changes: Mapping[str, Any] | None = None, **more: Any) -> SideFacts:
    """A right engine with some facts changed; ``None`` makes one unreadable, ``...`` leaves it out."""
    facts = {**FACTS[engine], **(changes or {})}
    return SideFacts(
        engine=engine,
        observations=[
            Observation(name, value, f"{engine}.{name}", "" if value is not None else "it is hidden")
            for name, value in facts.items()
            if value is not ...
        ],
        **{"steps": WHOLE, "token_ids": IDS, "files": FILES, **more},
    )


def judged(
    candidate: SideFacts | None = None,
    reference: SideFacts | None = None,
    config: Mapping[str, Any] = CONFIG,
    case: Case = CASE,
    **options: Any,
) -> dict[str, Condition]:
    structure: Structure = structure_of(config)
    sides = {"candidate": candidate or side("lmdeploy"), "reference": reference or side("vllm")}
    return {condition.name: condition for condition in evaluate(case, info(config), structure, sides, **options)}


def not_ok(conditions: Mapping[str, Condition]) -> dict[str, str]:
    return {name: condition.verdict for name, condition in conditions.items() if not condition.ok}
