"""Hooks inside vllm-ascend's model runner, in every worker."""

from __future__ import annotations

import functools
from typing import Any

from adapters.probe.births import told
from adapters.probe.launch import probe_dir
from adapters.probe.live import OncePerRun, write_facts, write_live
from adapters.probe.steplog import StepLog, process_log
from adapters.probe.worker import Worker
from adapters.vllm import experts, observe

#: Name of our entry in ``SamplingParams.extra_args``.
KEY = "align_key"

_keys: dict[str, str] = {}
_runs = OncePerRun()


def _dp_rank(runner: Any) -> int:
    """The data-parallel group; engines of dense models know their own number alone (``data_parallel_index``)."""
    return int(runner.vllm_config.parallel_config.data_parallel_index)


def _rank(runner: Any) -> int:
    """The global rank: the world group of an engine of a dense model is that of its own data-parallel group."""
    from vllm.distributed.parallel_state import get_world_group

    parallel, world = runner.vllm_config.parallel_config, get_world_group()
    if parallel.data_parallel_size > 1:
        return int(world.rank)
    return _dp_rank(runner) * int(world.world_size) + int(world.rank)


def _log(runner: Any) -> StepLog:
    found = process_log(_rank(runner), _dp_rank(runner))
    assert found is not None
    return found


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
            log = _log(self)
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
            if log.in_step and log.recorder is not None and log.recorder.structure.experts:
                log.sent(experts.live_dispatch())
            if log.in_step and _runs.first(log.generation):
                write_facts(
                    probe_dir(), "sampling", _rank(self), observe.sampling_facts(self.input_batch.sampling_metadata)
                )
        return original(self, *args, **kwargs)

    return model_forward


def _wrap_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        self._align_worker = Worker("vllm", _rank(self), int(get_tp_group().rank_in_group), _dp_rank(self))
        with told(_rank(self)):
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
        _log(self)
        # Block 0 is vLLM's null block.
        self._align_worker.after_cache(self.vllm_config.cache_config.block_size, _caches(self), reserved=(0,))
        facts = [*observe.worker_facts(self), *observe.start_facts(self, probe_dir(), _rank(self))]
        write_live(probe_dir(), _rank(self), facts)
        return result

    return initialize_kv_cache


def _wrap_dummy(original: Any) -> Any:
    @functools.wraps(original)
    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = args[0] if args else kwargs.get("num_tokens", 0)
        log = _log(self)
        # Groups that step together make dummies while others have requests.
        idle = int(self.vllm_config.parallel_config.data_parallel_size) > 1 and log.enter_announced() > 0
        log.dummy(int(found), idle=idle)
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
