"""Hooks inside vllm-ascend's model runner, in every worker."""

from __future__ import annotations

import functools
from typing import Any

from adapters.probe.launch import probe_dir
from adapters.probe.live import OncePerRun, write_facts, write_live
from adapters.probe.steplog import process_log
from adapters.probe.worker import Worker
from adapters.vllm import observe

#: Name of our entry in ``SamplingParams.extra_args``.
KEY = "align_key"

_keys: dict[str, str] = {}
_runs = OncePerRun()


def _rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().rank)


def _rows(scheduler_output: Any) -> list[tuple[str, int, int]]:
    """``(request key, first position, count)`` of each scheduled request."""
    scheduled = scheduler_output.num_scheduled_tokens
    rows = []
    for request in scheduler_output.scheduled_new_reqs:
        _keys[request.req_id] = request.sampling_params.extra_args[KEY]
        rows.append((_keys[request.req_id], request.num_computed_tokens, scheduled[request.req_id]))
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        rows.append((_keys[request_id], computed, scheduled[request_id]))
    return rows


def _wrap_execute(original: Any) -> Any:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            _keys.pop(request_id, None)
        if scheduler_output.total_num_scheduled_tokens:
            log = process_log(_rank())
            assert log is not None
            log.step(_rows(scheduler_output))
            with log.watching():
                result = original(self, scheduler_output, *args, **kwargs)
            # Logits are computed inside; sampling comes later.
            log.end_step()
            return result
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _wrap_forward(original: Any) -> Any:
    @functools.wraps(original)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = process_log()
        if log is not None:
            # The scheduler's order is not the batch's: decodes come first.
            log.order([_keys[request_id] for request_id in self.input_batch.req_ids if request_id in _keys])
            if log.in_step and _runs.first(log.generation):
                write_facts(
                    probe_dir(), "sampling", _rank(), observe.sampling_facts(self.input_batch.sampling_metadata)
                )
        return original(self, *args, **kwargs)

    return model_forward


def _wrap_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        self._align_worker = Worker("vllm", _rank(), int(get_tp_group().rank_in_group))
        self._align_worker.before_build()
        result = original(self, *args, **kwargs)
        self._align_worker.after_load(self.model)
        return result

    return load_model


def _caches(runner: Any) -> list[tuple[Any, Any]]:
    """Keys and values of each layer, as far as the runner keeps them as pairs."""
    return [(pair[0], pair[1]) for pair in runner.kv_caches if len(pair) == 2]


def _wrap_cache(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        process_log(_rank())
        # Block 0 is vLLM's null block.
        self._align_worker.after_cache(self.vllm_config.cache_config.block_size, _caches(self), reserved=(0,))
        facts = [*observe.worker_facts(self), *observe.start_facts(self, probe_dir(), _rank())]
        write_live(probe_dir(), _rank(), facts)
        return result

    return initialize_kv_cache


def _wrap_dummy(original: Any) -> Any:
    @functools.wraps(original)
    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = process_log(_rank())
        assert log is not None
        log.dummy()
        return original(self, *args, **kwargs)

    return dummy_run


def install(module: Any) -> None:
    """Wrap the runner of ``vllm_ascend.worker.model_runner_v1``, whose module was just executed."""
    runner = module.NPUModelRunner
    runner.load_model = _wrap_load(runner.load_model)
    runner.initialize_kv_cache = _wrap_cache(runner.initialize_kv_cache)
    runner._model_forward = _wrap_forward(runner._model_forward)
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner._dummy_run = _wrap_dummy(runner._dummy_run)
