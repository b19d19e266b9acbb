"""Right calls of attention in both engines' words, and records of them as workers leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from align.attention.model import Model
from align.fa import Call, parse_tensor
from align.fa.files import CallWriter, Records, Row, Step, read_records

#: Two requests of 3 and 5 tokens, 4 heads of 128 over 2.
ROWS = (Row("a", 0, 3), Row("b", 0, 5))
SCALE = 128**-0.5
MODEL = Model(1, "bfloat16", SCALE, 1e-6, 128, 4, 2, (0, 0, 0))
AT = ("engine/attention.py:12 forward",)


def call(operator: str, **arguments: Any) -> Call:
    """A text that has the form of a tensor is one."""
    return Call(operator, {name: _value(value) for name, value in arguments.items() if value is not None})


def _value(value: Any) -> Any:
    if isinstance(value, str) and "[" in value:
        return parse_tensor(value)
    return tuple(value) if isinstance(value, list) else value


def fused(**changed: Any) -> Call:
    """vLLM's prefill."""
    given: dict[str, Any] = {
        "query": "bf16[8,4,128]@npu",
        "key": "bf16[8,2,128]@npu",
        "value": "bf16[8,2,128]@npu",
        "atten_mask": "int8[2048,2048]@npu=causal",
        "actual_seq_lengths": [3, 8],
        "actual_seq_lengths_kv": [3, 8],
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": SCALE,
        "input_layout": "TND",
        "sparse_mode": 3,
    }
    return call("npu_fused_infer_attention_score", **{**given, **changed})


def atb(**changed: Any) -> Call:
    """lmdeploy's prefill."""
    given: dict[str, Any] = {
        "query": "bf16[8,4,128]@npu",
        "key": "bf16[8,2,128]@npu",
        "value": "bf16[8,2,128]@npu",
        "mask": "bf16[5,5]@npu=causal",
        "seq_len": "int32[2]@cpu=[3,5]",
        "scale_value": SCALE * (1 + 1e-16),
        "num_heads": 4,
        "num_kv_heads": 2,
        "out": "bf16[8,4,128]@npu",
    }
    return call("_npu_flash_attention", **{**given, **changed})


def paged(**changed: Any) -> Call:
    """vLLM's decode behind them: both requests have one token more."""
    given: dict[str, Any] = {
        "query": "bf16[2,4,128]@npu",
        "key": "bf16[6,128,256]@npu",
        "value": "bf16[6,128,256]@npu",
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [4, 6],
        "block_table": "int32[2,1]@npu=[1,2]",
        "block_size": 128,
    }
    return fused(**{**given, **changed})


def atb_paged(**changed: Any) -> Call:
    """lmdeploy's decode; its blocks are others, and half as large."""
    given: dict[str, Any] = {
        "query": "bf16[2,4,128]@npu",
        "key_cache": "bf16[9,64,2,128]@npu",
        "value_cache": "bf16[9,64,2,128]@npu",
        "num_kv_heads": 2,
        "num_heads": 4,
        "scale_value": SCALE,
        "block_table": "int32[2,1]@npu=[5,3]",
        "context_lens": "int32[2]@cpu=[4,6]",
        "out": "bf16[2,4,128]@npu",
    }
    return call("_npu_paged_attention", **{**given, **changed})


def steps(phase: str, number: int = 0, run: int = 1, rank: int = 0) -> Step:
    rows = ROWS if phase == "prefill" else (Row("a", 3, 1), Row("b", 5, 1))
    return Step(rank, run, number, phase, rows)


def left(directory: Path, made: Mapping[Step, Sequence[tuple[Call, Sequence[int]]]]) -> Records:
    """Records of steps: their calls, with the layers that make each."""
    numbers: dict[Any, int] = {}
    writers: dict[int, CallWriter] = {}
    for step, calls in made.items():
        writer = (
            writers.setdefault(step.rank, CallWriter(directory, step.rank))
            if step.rank not in writers
            else writers[step.rank]
        )
        layers: dict[int, Sequence[int]] = {}
        for one, where in calls:
            key = (step.rank, one.key())
            if key not in numbers:
                numbers[key] = len(numbers)
                writer.call(numbers[key], one, where[0], AT, step)
            layers[numbers[key]] = where
        writer.seen(layers, step)
    found = read_records(directory)
    assert found is not None
    return found
