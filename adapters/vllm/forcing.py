"""The custom logits processor that records and forces tokens: vLLM's supported way to steer sampling.

It runs on raw float32 logits before anything that could change the greedy choice, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from adapters.probe.steplog import process_log
from adapters.vllm.hooks import KEY


class ForcingProcessor(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._keys: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._keys, batch_update, lambda params, prompt_ids, output_ids: (params.extra_args or {}).get(KEY)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        log = process_log()
        if log is None or not self._keys:
            return logits
        keys = [self._keys[row] for row in range(logits.shape[0])]
        for row, token in enumerate(log.choose(logits, keys)):
            if token is not None:
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return logits
