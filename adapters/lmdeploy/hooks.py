"""Hooks inside lmdeploy's model agent, in every worker.

* ``_async_step`` receives the sampling inputs of the batch; they name the session of each row.
* ``_async_model_forward`` is the one place that knows what is about to be computed, in prefill and in decode.
* ``_step_postprocess_with_output`` sees the raw logits of the last tokens, ``[num_requests, vocab]``.
* ``post_sampling`` of the agent strategy runs after sampling and before the token is broadcast to the other ranks, so
  a token replaced here is the one that every rank and the scheduler see.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from adapters.probe.steplog import process_log


class _State:
    """Of this worker; steps run one after the other."""

    sessions: Sequence[str] | None = None
    forced: Sequence[int | None] = ()


_state = _State()


def _session_keys(sampling_inputs: Any) -> list[str] | None:
    context = getattr(sampling_inputs, "session_ctx", None)
    return None if context is None else [str(entry["session_id"]) for entry in context]


def _wrap_step(original: Any) -> Any:
    @functools.wraps(original)
    async def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _state.sessions = _session_keys(kwargs.get("sampling_inputs"))
        try:
            return await original(self, *args, **kwargs)
        except Exception:
            # The worker's task keeps its exception to itself, and the engine then waits for ever.
            traceback.print_exc()
            sys.stderr.flush()
            raise

    return step


def _wrap_forward(original: Any) -> Any:
    @functools.wraps(original)
    async def forward(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        log = process_log(self.rank)
        assert log is not None
        if inputs.is_dummy or _state.sessions is None:
            log.dummy()
        else:
            log.step(zip(_state.sessions, inputs.history_lengths.tolist(), inputs.seq_length.tolist(), strict=True))
        return await original(self, inputs, *args, **kwargs)

    return forward


def _wrap_postprocess(original: Any) -> Any:
    @functools.wraps(original)
    async def postprocess(self: Any, last_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Before sampling, because processors may change the logits in place.
        log = process_log()
        _state.forced = () if log is None or _state.sessions is None else log.choose(last_logits, _state.sessions)
        return await original(self, last_logits, *args, **kwargs)

    return postprocess


def _wrap_post_sampling(original: Any) -> Any:
    @functools.wraps(original)
    def post_sampling(
        self: Any, inputs: Any, logits: torch.Tensor, next_token_ids: torch.Tensor, extra_inputs: Any
    ) -> Any:
        forced = {row: token for row, token in enumerate(_state.forced) if token is not None}
        if forced:
            device = next_token_ids.device
            next_token_ids = next_token_ids.clone()
            next_token_ids[torch.tensor(list(forced), device=device)] = torch.tensor(
                list(forced.values()), dtype=next_token_ids.dtype, device=device
            )
        return original(self, inputs, logits, next_token_ids, extra_inputs)

    return post_sampling


def install(agent: Any) -> None:
    """Wrap the classes of ``lmdeploy.pytorch.engine.model_agent.agent``, whose module was just executed."""
    from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy

    cls = agent.BaseModelAgent
    cls._async_step = _wrap_step(cls._async_step)
    cls._async_model_forward = _wrap_forward(cls._async_model_forward)
    cls._step_postprocess_with_output = _wrap_postprocess(cls._step_postprocess_with_output)
    ARModelAgentStrategy.post_sampling = _wrap_post_sampling(ARModelAgentStrategy.post_sampling)
