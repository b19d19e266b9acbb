"""Drives vLLM with its engine core in the adapter's own process, so that the batch of each step is decided here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from adapters.base import SAMPLING_PREFIX, EngineSpec, Observation, Progress, Request, split_options
from adapters.mistakes import require_options
from adapters.probe.adapter import ProbedAdapter, simulated_numerics
from adapters.probe.live import worker_observations
from align.checkpoints.table import structure_of

#: What vllm-ascend must not do behind our back; unknown keys are ignored by it, so they are read back.
_ADDITIONAL_CONFIG: dict[str, Any] = {
    "enable_cpu_binding": False,
    "weight_nz_mode": 0,
    "enable_mlapo": False,
    "enable_fused_mc2": 0,
    "enable_shared_expert_dp": False,
    "multistream_overlap_shared_expert": False,
    "refresh": True,
}


def _keywords(made: type) -> set[str]:
    """What a class may be given by name when it is made."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {one.name for one in inspect.signature(made).parameters.values() if one.kind in named}


def experts_of(model_path: str) -> int:
    """How many experts a layer of a checkpoint has; 0 for a dense model, and for one without a table."""
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    try:
        return structure_of(config).experts
    except ValueError:
        return 0


def group_environment(spec: EngineSpec) -> dict[str, str]:
    """How an engine in this process learns which data-parallel group of several it is.

    ``LLM`` refuses to be told so by its arguments; vLLM 0.23.0 has these variables for engines that are started beside
    each other (``ParallelConfig``).
    """
    return {
        "VLLM_DP_SIZE": str(spec.dp),
        "VLLM_DP_RANK": str(spec.dp_rank),
        "VLLM_DP_RANK_LOCAL": str(spec.dp_rank),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(spec.master_port),
    }


def number_engine(arguments: type, dp_rank: int) -> None:
    """Let the engine be one data-parallel group of a dense model, as vLLM itself would make it.

    vLLM 0.23.0 runs the groups of a dense model as engines that know nothing of each other: each is told that there is
    one group, and keeps its own number, which decides its devices (``EngineCoreProc.run_engine_core``). It offers that
    behind a server only; several groups in one process, or as peers offline, are refused for dense models (``LLM``,
    ``ParallelConfig``).

    Args:
        arguments: vLLM's ``EngineArgs``.
    """
    original: Any = arguments.create_engine_config  # type: ignore[attr-defined]

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        config.parallel_config.data_parallel_index = dp_rank
        config.parallel_config.data_parallel_rank_local = dp_rank
        return config

    arguments.create_engine_config = create_engine_config  # type: ignore[attr-defined]


class VllmAdapter(ProbedAdapter):
    name = "vllm"

    def __init__(self) -> None:
        super().__init__()
        self._llm: Any = None
        self._sampling: dict[str, Any] = {}
        self._dp = 1

    # ------------------------------------------------------------------------------------------------- launch

    def _build(self, spec: EngineSpec, progress: Progress) -> None:
        options = split_options(spec.options)
        # The engine core must run in this process: only then are all requests of a group known before the first step.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
        self._together = spec.dp > 1 and experts_of(spec.model_path) > 0
        if self._together:
            os.environ.update(group_environment(spec))
        options.export()
        self._sampling, self._dp = options.sampling, spec.dp
        progress("import", "vllm and vllm-ascend")
        from vllm import LLM, SamplingParams
        from vllm.engine.arg_utils import EngineArgs

        # LLM hands what it does not name itself on to EngineArgs.
        known = {field.name for field in dataclasses.fields(EngineArgs)} | _keywords(LLM)
        require_options(self.name, spec.side, options.engine, known)
        known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
        require_options(self.name, spec.side, options.sampling, known, SAMPLING_PREFIX)
        from adapters.vllm.forcing import ForcingProcessor

        groups = "" if spec.dp == 1 else f", dp {spec.dp} rank {spec.dp_rank}"
        progress("build", f"{Path(spec.model_path).name} in {spec.dtype}, tp {spec.tp}{groups}")
        if spec.dp > 1 and not self._together:
            number_engine(EngineArgs, spec.dp_rank)
        self._llm = LLM(**self._arguments(spec, options.engine, ForcingProcessor))

    def _arguments(self, spec: EngineSpec, overrides: Mapping[str, Any], processor: type) -> dict[str, Any]:
        """Arguments of ``LLM``; an override of ``additional_config`` is merged into ours, the others replace."""
        defaults = {
            "model": spec.model_path,
            "skip_tokenizer_init": True,
            "dtype": spec.dtype,
            "tensor_parallel_size": spec.tp,
            "enable_expert_parallel": spec.ep > 1,
            "enforce_eager": True,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_batch,
            "max_num_batched_tokens": max(spec.max_prefill_tokens, spec.max_model_len),
            "block_size": spec.block_size,
            "num_gpu_blocks_override": spec.num_blocks,
            "kv_cache_memory_bytes": self._cache_bytes(spec),
            "seed": spec.seed,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "async_scheduling": False,
            "logits_processors": [processor],
            "disable_log_stats": True,
        }
        additional = {**_ADDITIONAL_CONFIG, **overrides.get("additional_config", {})}
        return {**defaults, **overrides, "additional_config": additional}

    @staticmethod
    def _cache_bytes(spec: EngineSpec) -> int:
        """Enough for ``num_blocks`` blocks of the model's layers, both keys and values, in a two-byte dtype."""
        config = json.loads((Path(spec.model_path) / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_block = 2 * spec.block_size * heads * head_dim * 2 * int(config["num_hidden_layers"])
        return int(per_block * (spec.num_blocks + 1))

    # ------------------------------------------------------------------------------------------------ observe

    def observe(self) -> Sequence[Observation]:
        import torch

        config = self._llm.llm_engine.vllm_config
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        parallel = config.parallel_config
        npu: Any = getattr(torch, "npu", None)
        return [
            Observation("eager", bool(model.enforce_eager), "model_config.enforce_eager"),
            Observation("compilation_mode", int(config.compilation_config.mode), "compilation_config.mode"),
            Observation(
                "cudagraph_mode", config.compilation_config.cudagraph_mode.name, "compilation_config.cudagraph_mode"
            ),
            Observation("dtype", str(model.dtype).removeprefix("torch."), "model_config.dtype"),
            Observation("tp", parallel.tensor_parallel_size, "parallel_config.tensor_parallel_size"),
            Observation("dp", parallel.data_parallel_size, "parallel_config.data_parallel_size"),
            *self._group(parallel),
            Observation("expert_parallel", bool(parallel.enable_expert_parallel), "parallel_config"),
            Observation("block_size", cache.block_size, "cache_config.block_size"),
            Observation("num_blocks", cache.num_gpu_blocks, "cache_config.num_gpu_blocks"),
            Observation("prefix_caching", bool(cache.enable_prefix_caching), "cache_config.enable_prefix_caching"),
            Observation(
                "max_prefill_tokens", scheduler.max_num_batched_tokens, "scheduler_config.max_num_batched_tokens"
            ),
            Observation("chunked_prefill", bool(scheduler.enable_chunked_prefill), "scheduler_config"),
            Observation("async_scheduling", bool(scheduler.async_scheduling), "scheduler_config"),
            Observation("seed", model.seed, "model_config.seed"),
            Observation("worker", parallel.worker_cls, "parallel_config.worker_cls"),
            Observation("soc_version", npu.get_soc_version(), "torch.npu.get_soc_version")
            if npu is not None
            else Observation("soc_version", None, "torch.npu", "torch.npu is not there"),
            simulated_numerics(),
            Observation("vllm_ascend", metadata.version("vllm-ascend"), "installed distribution"),
            *worker_observations(self._probe_dir, self._ranks),
        ]

    def _group(self, parallel: Any) -> list[Observation]:
        """Which data-parallel group this engine is. Of a dense model it was not told how many there are."""
        return [] if self._dp == 1 else [Observation("dp_rank", parallel.data_parallel_index, "parallel_config")]

    # ----------------------------------------------------------------------------------------------- generate

    def _key(self, generation: int, index: int, request: Request) -> str:
        return f"{generation}:{request.name}"

    def _execute(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        engine = self._llm.llm_engine
        waiting = sorted(requests, key=lambda key: requests[key].arrival)
        returned: dict[str, list[int]] = {}
        arrivals = {*self._arrivals, *(request.arrival for request in requests.values())}
        step = 0
        while True:
            while waiting and requests[waiting[0]].arrival <= step:
                self._add(engine, waiting[0], requests[waiting[0]])
                waiting.pop(0)
            # Groups that step together agree on this: each has to ask as often as the others.
            if not engine.has_unfinished_requests():
                later = [arrival for arrival in arrivals if arrival > step]
                if not later:
                    break
                step = min(later)  # no engine has anything left: the next arrival comes now
                continue
            for output in engine.step():
                if output.finished:
                    key = output.request_id
                    returned[requests[key].name] = list(output.outputs[0].token_ids)
            step += 1
        return returned

    def _add(self, engine: Any, key: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine.add_request(
            key,
            TokensPrompt(prompt_token_ids=list(request.token_ids)),
            SamplingParams(**self._sampling_params(key, request)),
        )

    def _sampling_params(self, key: str, request: Request) -> dict[str, Any]:
        """Greedy, unless the options of this side ask for something else."""
        from adapters.vllm.hooks import KEY

        return {
            # vLLM ignores top_k and top_p at temperature 0.
            "temperature": 1.0 if self._sampling else 0.0,
            "max_tokens": request.max_new_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "stop_token_ids": list(request.stop_ids) or None,
            "extra_args": {KEY: key},
            **self._sampling,
        }

    # -------------------------------------------------------------------------------------------------- close

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
