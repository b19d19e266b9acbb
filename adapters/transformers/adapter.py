"""transformers as an engine: one request at a time, eager attention, a KV cache, true decode steps.

It is the yardstick for both real engines: nothing is batched, padded, paged or fused. ``float32`` is accepted
beside the engines' dtypes; it upcasts the same stored weights and serves as the golden run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from adapters.base import (
    Adapter,
    EngineSpec,
    Generation,
    Observation,
    Progress,
    Request,
    RowSpan,
    RunResult,
    StepRecord,
    TokenStep,
)
from adapters.transformers.tensors import fill_window

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: More threads than this do not help models of this size and take the cores from the engines.
MAX_THREADS = 4


class TransformersAdapter(Adapter):
    """Greedy generation and forced replay with ``AutoModelForCausalLM``.

    ``spec.options`` may hold ``threads`` (int): threads that torch may use while the adapter is open; by
    default half of the processor's cores, at most 4.
    """

    name = "transformers"

    def __init__(self) -> None:
        self._model: Any = None
        self._max_positions = 0
        self._vocab_size = 0
        self._steps_done = 0
        self._threads_before: int | None = None

    def launch(self, spec: EngineSpec, progress: Progress) -> None:
        """Load the checkpoint.

        Raises:
            ValueError: an unknown dtype or option, or a layout other than one rank.
        """
        if spec.dtype not in DTYPES:
            raise ValueError(f"transformers cannot run dtype {spec.dtype!r}; valid: {', '.join(DTYPES)}")
        if (spec.tp, spec.dp, spec.ep) != (1, 1, 1):
            raise ValueError(f"transformers runs on one rank, got tp={spec.tp} dp={spec.dp} ep={spec.ep}; use 1 1 1")
        unknown = sorted(set(spec.options) - {"threads"})
        if unknown:
            raise ValueError(f"transformers has no option {', '.join(unknown)}; valid: threads")
        threads = spec.options.get("threads", min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads must be a positive integer, got {threads!r}")
        self.close()
        progress("import", "transformers")
        from transformers import AutoModelForCausalLM

        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        progress("load", f"{spec.model_path} as {spec.dtype}")
        model = AutoModelForCausalLM.from_pretrained(
            spec.model_path, dtype=DTYPES[spec.dtype], attn_implementation="eager", local_files_only=True
        )
        fill_window(model.config)
        self._model = model.eval()
        self._max_positions = int(model.config.max_position_embeddings)
        self._vocab_size = int(model.config.vocab_size)
        self._steps_done = 0
        progress("ready")

    def observe(self) -> Sequence[Observation]:
        """Settings as the loaded model has them."""
        model = self._running()
        import transformers

        config = model.config
        parameter = next(model.parameters())
        return (
            Observation("version", transformers.__version__, "transformers.__version__"),
            Observation("dtype", str(parameter.dtype).removeprefix("torch."), "model.parameters()"),
            Observation("device", parameter.device.type, "model.parameters()"),
            Observation("attention", config._attn_implementation, "model.config._attn_implementation"),
            Observation("eager", not hasattr(model, "_orig_mod"), "type(model)"),
            Observation("vocab_size", self._vocab_size, "model.config.vocab_size"),
            Observation("max_model_len", self._max_positions, "model.config.max_position_embeddings"),
            Observation("num_layers", int(config.num_hidden_layers), "model.config.num_hidden_layers"),
            Observation("tie_word_embeddings", bool(config.tie_word_embeddings), "model.config.tie_word_embeddings"),
            Observation("threads", torch.get_num_threads(), "torch.get_num_threads()"),
            Observation("block_size", None, "", "the KV cache is not paged"),
        )

    def generate(self, requests: Sequence[Request], top_k: int) -> RunResult:
        """Generate greedily, one request after the other; ``arrival`` and ``dp_rank`` change nothing here."""
        for request in requests:
            if request.forced is not None:
                raise ValueError(f"request {request.name} has forced ids; use replay")
        return self._run(requests, top_k)

    def replay(self, requests: Sequence[Request], top_k: int) -> RunResult:
        """Decode step by step with a KV cache while each token is replaced by the request's ``forced`` id."""
        for request in requests:
            if request.forced is None or len(request.forced) != request.max_new_tokens:
                given = "none" if request.forced is None else len(request.forced)
                raise ValueError(f"request {request.name} needs {request.max_new_tokens} forced ids, got {given}")
        return self._run(requests, top_k)

    def close(self) -> None:
        """Drop the model and give torch its threads back."""
        self._model = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _running(self) -> Any:
        if self._model is None:
            raise ValueError("the transformers adapter is not launched; call launch first")
        return self._model

    def _check(self, request: Request) -> None:
        length = len(request.token_ids)
        if length == 0 or request.max_new_tokens < 1:
            raise ValueError(f"request {request.name} needs at least one prompt id and one new token")
        if length + request.max_new_tokens > self._max_positions:
            raise ValueError(
                f"request {request.name}: {length} prompt ids and {request.max_new_tokens} new tokens "
                f"exceed the model's {self._max_positions} positions"
            )
        for token in (*request.token_ids, *(request.forced or ())):
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"request {request.name}: id {token} is outside 0 … {self._vocab_size - 1}")

    def _run(self, requests: Sequence[Request], top_k: int) -> RunResult:
        self._running()
        if not 1 <= top_k <= self._vocab_size:
            raise ValueError(f"top_k must be within 1 … {self._vocab_size}, got {top_k}")
        for request in requests:
            self._check(request)
        started = time.perf_counter()
        generations = []
        records: list[StepRecord] = []
        with torch.inference_mode():
            for request in requests:
                generations.append(self._one(request, top_k, records))
        return RunResult(tuple(generations), tuple(records), time.perf_counter() - started)

    def _one(self, request: Request, top_k: int, records: list[StepRecord]) -> Generation:
        """Prefill the prompt, then decode one token per forward."""
        fed: tuple[int, ...] = request.token_ids
        start = 0
        cache: Any = None
        steps: list[TokenStep] = []
        for index in range(request.max_new_tokens):
            output = self._model(
                input_ids=torch.tensor([fed]),
                position_ids=torch.arange(start, start + len(fed))[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            greedy, top = best_ids(output.logits[0, -1], top_k)
            chosen = greedy if request.forced is None else request.forced[index]
            steps.append(TokenStep(chosen, greedy, top))
            records.append(
                StepRecord(
                    step=self._steps_done,
                    phase="decode" if index else "prefill",
                    rows=(RowSpan(request.name, start, len(fed)),),
                    forced={} if request.forced is None else {request.name: chosen},
                )
            )
            self._steps_done += 1
            if chosen in request.stop_ids:
                break
            start += len(fed)
            fed = (chosen,)
        return Generation(request.name, tuple(steps))


def best_ids(logits: torch.Tensor, top_k: int) -> tuple[int, tuple[tuple[int, float], ...]]:
    """Greedy id and the ``top_k`` best ``(id, logprob)`` of one row of raw logits ``[vocab]``.

    Logprobs are log-softmax in float32. Equal logits are ordered by id, so that the greedy id heads the list;
    NaN counts as larger than any number, as it does for ``argmax``.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    order = torch.sort(logits, descending=True, stable=True).indices[:top_k].tolist()
    return order[0], tuple((token, float(logprobs[token])) for token in order)
