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
from contextlib import nullcontext
from typing import Any

import torch

from adapters.lmdeploy import experts, lockstep, observe, receiver
from adapters.probe.births import told
from adapters.probe.launch import SIMULATED, probe_dir, read_launch
from adapters.probe.live import OncePerRun, write_facts, write_live
from adapters.probe.steplog import StepLog, process_log
from adapters.probe.worker import Worker


class _State:
    """Of this worker; steps run one after the other."""

    sessions: Sequence[str] | None = None
    forced: Sequence[int | None] = ()
    #: Of the step that is about to run.
    sampling: Any = None
    warming = False
    runs = OncePerRun()


_state = _State()


def _session_keys(sampling_inputs: Any) -> list[str] | None:
    context = getattr(sampling_inputs, "session_ctx", None)
    return None if context is None else [str(entry["session_id"]) for entry in context]


def _wrap_step(original: Any) -> Any:
    @functools.wraps(original)
    async def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _state.sampling = kwargs.get("sampling_inputs")
        _state.sessions = _session_keys(_state.sampling)
        try:
            with told(self.rank, "step"):
                return await original(self, *args, **kwargs)
        except Exception:
            # The worker's task keeps its exception to itself, and the engine then waits for ever.
            traceback.print_exc()
            sys.stderr.flush()
            raise

    return step


def _log(agent: Any) -> StepLog:
    found = process_log(agent.rank, agent.dist_config.dp_rank)
    assert found is not None
    return found


def _wrap_forward(original: Any) -> Any:
    @functools.wraps(original)
    async def forward(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        log, together = _log(self), lockstep.of_agent(self)
        about: dict[str, Any] = {}
        if self.dist_config.dp > 1:  # one prefill makes the forward of all ranks a prefill
            about = {"mode": "decode" if inputs.is_decoding else "prefill"}
        if together is not None:
            about["cycle"] = together.cycle
        if inputs.is_dummy or _state.sessions is None:
            log.dummy(int(inputs.input_ids.numel()), idle=self.dist_config.dp > 1, **about)
        else:
            rows = zip(_state.sessions, inputs.history_lengths.tolist(), inputs.seq_length.tolist(), strict=True)
            log.step(rows, **about)
            if _state.runs.first(log.generation):
                write_facts(probe_dir(), "sampling", self.rank, observe.sampling_facts(_state.sampling))
        result = await original(self, inputs, *args, **kwargs)
        # The logits are part of the result, on every rank.
        log.end_step()
        if together is not None:
            together.computed()
        return result

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


def _wrap_warmup(original: Any) -> Any:
    @functools.wraps(original)
    def warmup(self: Any, *args: Any, **kwargs: Any) -> Any:
        _state.warming = True
        try:
            with told(self.rank):
                result = original(self, *args, **kwargs)
        finally:
            _state.warming = False
        write_live(
            probe_dir(), self.rank, [*observe.worker_facts(self), *observe.start_facts(self, probe_dir(), self.rank)]
        )
        return result

    return warmup


def _wrap_forward_impl(original: Any) -> Any:
    @functools.wraps(original)
    def forward_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = _log(self)
        if _state.warming:
            log.dummy()
        with log.watching():
            return original(self, *args, **kwargs)

    return forward_impl


def _wrap_get_logits(original: Any) -> Any:
    @functools.wraps(original)
    def get_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = process_log()
        with nullcontext() if log is None else log.watching():
            return original(self, *args, **kwargs)

    return get_logits


def _unblock_receiver() -> None:
    """Where collectives block the host, see :mod:`adapters.lmdeploy.receiver`; nothing is changed on hardware."""
    if read_launch().device == SIMULATED:
        from lmdeploy.pytorch.engine.executor import mp_executor

        receiver.unblock(mp_executor)


def _wrap_build_model(original: Any) -> Any:
    @functools.wraps(original)
    def build_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.dist_ctx.attn_tp_group
        self._align_worker = Worker("lmdeploy", self.rank, 0 if group is None else group.rank, self.dist_config.dp_rank)
        with told(self.rank):
            self._align_worker.before_build()
            _unblock_receiver()
            result = original(self, *args, **kwargs)
            experts.install()
            with self.all_context():
                self._align_worker.after_load(self.patched_model)
        return result

    return build_model


def _wrap_build_cache(original: Any) -> Any:
    @functools.wraps(original)
    def build_cache_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        with told(self.rank):
            result = original(self, *args, **kwargs)
            _log(self)
            with self.all_context():
                caches = [(layer[0], layer[1]) for layer in self.cache_engine.gpu_cache]
                reserved = tuple(range(self.cache_config.num_reserved_gpu_blocks))
                self._align_worker.after_cache(self.cache_config.block_size, caches, reserved)
        return result

    return build_cache_engine


def install(agent: Any) -> None:
    """Wrap the classes of ``lmdeploy.pytorch.engine.model_agent.agent``, whose module was just executed."""
    from lmdeploy.pytorch.engine.model_agent.inputs_maker import DPForwardInputsMaker
    from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy

    cls = agent.BaseModelAgent
    cls.build_model = _wrap_build_model(cls.build_model)
    cls.build_cache_engine = _wrap_build_cache(cls.build_cache_engine)
    cls.warmup = _wrap_warmup(cls.warmup)
    cls._forward_impl = _wrap_forward_impl(cls._forward_impl)
    cls.get_logits = _wrap_get_logits(cls.get_logits)
    lockstep.install(DPForwardInputsMaker, cls)
    cls._async_step = _wrap_step(cls._async_step)
    cls._async_model_forward = _wrap_forward(cls._async_model_forward)
    cls._step_postprocess_with_output = _wrap_postprocess(cls._step_postprocess_with_output)
    ARModelAgentStrategy.post_sampling = _wrap_post_sampling(ARModelAgentStrategy.post_sampling)
