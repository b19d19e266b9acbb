"""Hooks inside vllm-ascend's model runner, in every worker."""

from __future__ import annotations

import functools
from typing import Any

from adapters.probe.steplog import process_log

#: Name of our entry in ``SamplingParams.extra_args``.
KEY = "align_key"

_keys: dict[str, str] = {}


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
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


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
    runner.execute_model = _wrap_execute(runner.execute_model)
    runner._dummy_run = _wrap_dummy(runner._dummy_run)
