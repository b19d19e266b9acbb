"""Drives lmdeploy's PyTorch engine in process, beneath its pipeline.

The engine lives on an event loop in a thread of its own; the adapter's calls are synchronous. Workers of a parallel
layout are started by lmdeploy's own executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.base import NO_SUCH_MODE, SAMPLING_PREFIX, EngineSpec, Observation, Progress, Request, split_options
from adapters.lmdeploy.defaults import engine_defaults
from adapters.lmdeploy.gate import Gate
from adapters.lmdeploy.lockstep import read_due
from adapters.lmdeploy.workers import keep_connected, require_cluster
from adapters.mistakes import require_options
from adapters.probe.adapter import ProbedAdapter, simulated_numerics
from adapters.probe.live import worker_observations

#: Session numbers of one run start here; runs do not share sessions, so nothing is resumed by accident.
_SESSIONS_PER_RUN = 10_000
#: Modes of vLLM, and how they would be called here; lmdeploy 0.12.2 has neither.
_VLLM_MODES = {"chunked_prefill": "enable_chunked_prefill", "async_scheduling": "async_scheduling"}


class LmdeployAdapter(ProbedAdapter):
    name = "lmdeploy"

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate = Gate()
        self._sampling: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------- launch

    def _build(self, spec: EngineSpec, progress: Progress) -> None:
        options = split_options(spec.options)
        os.environ.setdefault("LMDEPLOY_SKIP_WARMUP", "1")
        if spec.dp > 1:
            os.environ["LMDEPLOY_DP_MASTER_ADDR"] = "127.0.0.1"
            os.environ["LMDEPLOY_DP_MASTER_PORT"] = str(spec.master_port)
        options.export()
        self._sampling = options.sampling
        progress("import", "lmdeploy and dlinfer")
        from lmdeploy.messages import GenerationConfig, PytorchEngineConfig

        # Before the engine is imported, which takes longer than all of the above.
        for given, config_type, prefix in (
            (options.engine, PytorchEngineConfig, ""),
            (options.sampling, GenerationConfig, SAMPLING_PREFIX),
        ):
            known = [field.name for field in dataclasses.fields(config_type)]
            require_options(self.name, spec.side, given, known, prefix)
        from lmdeploy.pytorch.engine.engine import Engine
        from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync

        self._gate.hold = spec.hold_arrivals
        if spec.dp > 1 and spec.hold_arrivals:
            self._gate.due = lambda: read_due(self._probe_dir, spec.ranks[0], self._generation)
        for method in ("send_next_inputs", "prefetch_next_inputs"):
            setattr(InputsMakerAsync, method, self._gate.wrap(getattr(InputsMakerAsync, method)))
        config = PytorchEngineConfig(**{**engine_defaults(spec), **options.engine})
        if config.distributed_executor_backend == "ray":
            require_cluster(spec)
        groups = "" if spec.dp == 1 else f", dp {spec.dp} rank {spec.dp_rank}"
        progress("build", f"{Path(spec.model_path).name} in {spec.dtype}, tp {spec.tp}{groups}")
        # The multi-process executor installs signal handlers, which Python allows in the main thread only.
        self._engine = Engine.from_pretrained(spec.model_path, engine_config=config)
        if config.distributed_executor_backend == "ray":
            keep_connected(self._engine.executor)
        self._start_loop()
        self._call(self._start_engine())

    async def _start_engine(self) -> None:
        self._engine.start_loop()

    def _start_loop(self) -> None:
        self._loop = asyncio.new_event_loop()

        def run(loop: asyncio.AbstractEventLoop) -> None:
            asyncio.set_event_loop(loop)
            loop.run_forever()

        self._thread = threading.Thread(target=run, args=(self._loop,), name="lmdeploy-loop", daemon=True)
        self._thread.start()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------------------------------------------ observe

    def observe(self) -> Sequence[Observation]:
        import torch
        from lmdeploy.pytorch import envs

        engine = self._engine
        config, cache = engine.engine_config, engine.cache_config
        seen = [
            Observation("eager", bool(config.eager_mode), "engine_config.eager_mode"),
            Observation("warmup_skipped", bool(envs.skip_warmup), "lmdeploy.pytorch.envs.skip_warmup"),
            Observation("dtype", str(engine.model_config.dtype).removeprefix("torch."), "model_config.dtype"),
            Observation("tp", engine.dist_config.attn_tp, "dist_config.attn_tp"),
            Observation("dp", engine.dist_config.dp, "dist_config.dp"),
            Observation("dp_rank", engine.dist_config.dp_rank, "dist_config.dp_rank"),
            Observation("mlp_tp", engine.dist_config.mlp_tp, "dist_config.mlp_tp"),
            Observation("ep", engine.dist_config.ep, "dist_config.ep"),
            Observation("block_size", cache.block_size, "cache_config.block_size"),
            Observation("num_blocks", cache.num_gpu_blocks, "cache_config.num_gpu_blocks"),
            Observation("prefix_caching", bool(cache.enable_prefix_caching), "cache_config.enable_prefix_caching"),
            Observation("executor", type(engine.executor).__name__, "engine.executor"),
            Observation("max_prefill_tokens", cache.max_prefill_token_num, "cache_config.max_prefill_token_num"),
            # It prepares the next inputs while a step runs, but a step waits for the tokens of the one before.
            *(
                Observation(name, getattr(config, option, NO_SUCH_MODE), f"engine_config.{option}")
                for name, option in _VLLM_MODES.items()
            ),
            simulated_numerics(),
            *worker_observations(self._probe_dir, self._ranks),
        ]
        npu: Any = getattr(torch, "npu", None)
        seen.append(
            Observation("soc_version", npu.get_soc_version(), "torch.npu.get_soc_version")
            if npu is not None
            else Observation("soc_version", None, "torch.npu", "torch.npu is not there")
        )
        return seen

    # ----------------------------------------------------------------------------------------------- generate

    def _key(self, generation: int, index: int, request: Request) -> str:
        return str(generation * _SESSIONS_PER_RUN + index)

    def _execute(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        returned: dict[str, list[int]] = self._call(self._stream_all(requests))
        return returned

    async def _stream_all(self, keys: Mapping[str, Request]) -> dict[str, list[int]]:
        scheduler = self._engine.scheduler
        tasks: dict[str, asyncio.Task[list[int]]] = {}

        def submit(key: str) -> None:
            tasks[key] = asyncio.get_running_loop().create_task(self._stream(int(key), keys[key]))

        def known(key: str) -> bool:
            # A request that was refused has ended and will never be known.
            session = scheduler.sessions.get(int(key))
            return tasks[key].done() or (session is not None and bool(session.sequences))

        self._gate.arm([(request.arrival, key) for key, request in keys.items()], submit, known)
        while len(tasks) < len(keys) or not all(task.done() for task in tasks.values()):
            running = [task for task in tasks.values() if not task.done()]
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            else:
                await self._gate.next_arrival()
        return {keys[key].name: task.result() for key, task in tasks.items()}

    async def _stream(self, session: int, request: Request) -> list[int]:
        from lmdeploy.messages import GenerationConfig, ResponseType

        config = GenerationConfig(**self._generation_config(request))
        instance = self._engine.create_instance()
        tokens: list[int] = []
        async for output in instance.async_stream_infer(session, list(request.token_ids), gen_config=config):
            if output.status not in (ResponseType.SUCCESS, ResponseType.FINISH):
                raise RuntimeError(f"lmdeploy answered {output.status.name} for request {request.name}")
            tokens += list(output.token_ids)
        await instance.async_end(session)
        return tokens

    def _generation_config(self, request: Request) -> dict[str, Any]:
        """Greedy, unless the options of this side ask for something else."""
        return {
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": 0 if request.stop_ids else request.max_new_tokens,
            "do_sample": bool(self._sampling),
            "top_k": 1,
            "temperature": 1.0,
            "ignore_eos": not request.stop_ids,
            "stop_token_ids": list(request.stop_ids) or None,
            **self._sampling,
        }

    # -------------------------------------------------------------------------------------------------- close

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None or self._loop is None:
            return
        self._loop.call_soon_threadsafe(engine.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
