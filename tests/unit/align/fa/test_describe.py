"""Descriptions of live calls: masks against a brute force, what is kept, and that nothing beyond torch is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.fa import Checker, Context, Describer, TensorFacts, call_record, check_attention, check_call, read_call
from align.fa.call import MASK_PATTERNS, MaskFacts
from align.fa.masks import mask_facts
from align.fa.text import parse_tensor
from envs.home import REPOSITORY

FIA = "npu_fused_infer_attention_score"


def arguments() -> dict[str, Any]:
    key = torch.zeros(6, 128, 256, dtype=torch.bfloat16)
    return {
        "query": torch.ones(2, 4, 128, dtype=torch.bfloat16), "key": key, "value": key,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "block_table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), "block_size": 128,
        "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": torch.tensor([130, 7]), "num_heads": 4,
        "num_key_value_heads": 2, "scale": 128**-0.5, "input_layout": "TND", "sparse_mode": 3,
    }  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 2), st.data())
def test_facts_of_a_mask_are_those_of_its_places(rows: int, columns: int, matrices: int, data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=rows * columns * matrices, max_size=rows * columns * matrices))
    mask = torch.tensor(flags).reshape(matrices, rows, columns)
    facts = mask_facts(mask.to(data.draw(st.sampled_from([torch.bool, torch.int8, torch.float16]))))
    cells = [(m, i, j) for m in range(matrices) for i in range(rows) for j in range(columns)]
    assert facts.upper_open == sum(not mask[cell] for cell in cells if cell[2] > cell[1])
    assert facts.lower_hidden == sum(bool(mask[cell]) for cell in cells if cell[2] <= cell[1])
    first = [
        next((j for j in range(columns) if not mask[m, i, j]), columns) for m in range(matrices) for i in range(rows)
    ]
    assert facts.first_open == (tuple(first) if any(first) else ())
    shapes: dict[str, Callable[[int, int], bool]] = {
        "causal": lambda i, j: j > i,
        "causal right": lambda i, j: j > i + columns - rows,
        "causal and diagonal": lambda i, j: j >= i,
        "past": lambda i, j: j < i,
        "past and diagonal": lambda i, j: j <= i,
        "all": lambda i, j: True,
        "none": lambda i, j: False,
    }
    fitting = {name for name, hides in shapes.items() if all(bool(mask[cell]) == hides(*cell[1:]) for cell in cells)}
    assert facts.pattern in (fitting or {"other"})
    assert facts.pattern in MASK_PATTERNS


def test_masks_that_hide_the_same_have_one_digest() -> None:
    causal = torch.ones(9, 9).triu(1)
    same = {mask_facts(causal.to(dtype)).digest for dtype in (torch.bool, torch.int8, torch.uint8, torch.float16)}
    assert len(same) == 1
    assert mask_facts(causal.T).digest not in same
    assert mask_facts(causal.reshape(1, 81, 1)).digest not in same


def test_a_live_call_and_its_description_are_judged_alike() -> None:
    live = check_attention(FIA, **arguments(), phase="decode", layer=3)
    said = check_call(read_call(json.loads(json.dumps(call_record(live.call)))))
    assert live.ok and live.findings == said.findings and live.held == said.held and live.unknown == said.unknown
    assert live.call.context == Context(phase="decode", layer=3)


def test_arguments_by_position_get_their_names() -> None:
    given = arguments()
    call = Describer().describe(FIA, [given.pop("query"), given.pop("key")], given)
    assert set(call.arguments) == set(arguments())
    with pytest.raises(ValueError, match="query twice"):
        Describer().describe(FIA, [given["value"]], {"query": given["value"]})
    with pytest.raises(ValueError, match="by position"):
        Describer().describe("scatter_update_", [1, 2, 3, 4, 5], {})


def test_equal_memory_is_seen_and_lengths_are_read() -> None:
    call = Describer().describe(FIA, (), arguments())
    key, value, query = (call.arguments[name] for name in ("key", "value", "query"))
    assert isinstance(key, TensorFacts) and isinstance(value, TensorFacts) and isinstance(query, TensorFacts)
    assert key.memory == value.memory != query.memory
    lengths = call.arguments["actual_seq_lengths_kv"]
    assert isinstance(lengths, TensorFacts)
    assert (lengths.shape, lengths.dtype, lengths.device, lengths.values) == ((2,), "int64", "cpu", (130, 7))
    assert key.values is None


def test_numbers_that_are_none_are_counted_on_request() -> None:
    given = arguments()
    given["query"][0, 0, :3] = float("nan")
    assert "fa.tensors.nonfinite" in {one.rule for one in check_attention(FIA, **given).errors}
    quiet = Checker().check(FIA, **given)
    assert "fa.tensors.nonfinite" not in {one.rule for one in quiet.findings} | set(quiet.held)


def test_a_large_table_keeps_its_ends() -> None:
    given = arguments()
    given["block_table"] = torch.arange(5000, dtype=torch.int32).reshape(2, 2500) + 1
    call = Describer().describe(FIA, (), given)
    table = call.arguments["block_table"]
    assert isinstance(table, TensorFacts) and table.values is None and (table.low, table.high) == (1, 5000)
    assert check_call(call).unknown["fa.paged.table-range"] == "block table and key lengths"


def test_a_checker_judges_equal_calls_once_and_looks_at_a_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look(mask: torch.Tensor) -> MaskFacts:
        looked.append(1)
        return mask_facts(mask)

    monkeypatch.setattr("align.fa.describe.mask_facts", look)
    checker, given = Checker(), arguments()
    first = checker.check(FIA, context=Context(phase="decode", layer=0), **given)
    again = checker.check(FIA, context=Context(phase="decode", layer=1), **given)
    assert again.findings is first.findings and again.call.context.layer == 1
    assert looked == [1]
    given["atten_mask"][0, 5] = 0  # written: looked at again
    assert checker.check(FIA, context=Context(phase="decode", layer=1), **given).findings != first.findings
    assert looked == [1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [("bf16", "no tensor"), ("int32[2]=[1]", "1 values"), ("bool[4]=causal", "pattern"), ("int32[1]=[a]", "integers")],
)
def test_a_short_form_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_tensor(text)


def test_a_record_that_is_no_call_is_refused() -> None:
    for record, words in (
        ({"operator": FIA}, "arguments"),
        ({"operator": FIA, "arguments": {}, "schema": 2}, "schema 2"),
        ({"operator": FIA, "arguments": {}, "context": {"phas": "decode"}}, "no phas"),
        ({"operator": FIA, "arguments": {}, "context": {"phase": "warmup"}}, "warmup"),
        ({"operator": FIA, "arguments": {"query": {"tensor": {"shape": [1]}}}}, "dtype"),
        ({"operator": FIA, "arguments": {"query": {"shape": [1]}}}, "tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            read_call(record)


def test_a_model_file_needs_torch_alone() -> None:
    """In an interpreter where everything else that could be imported is missing."""
    program = """
import sys
allowed = {"torch", "align"} | set(sys.stdlib_module_names)
class Gate:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("pydantic", "typer", "rich", "numpy", "ray", "safetensors", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Gate())
import torch
from align.fa import check_attention
q = torch.ones(2, 4, 128, dtype=torch.float16)
report = check_attention("npu_fused_infer_attention_score", q, q, q, input_layout="TND", phase="prefill",
                         actual_seq_lengths=[1, 1], actual_seq_lengths_kv=[1, 2], num_heads=4, scale=1.0,
                         atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1), sparse_mode=3)
print(sorted(one.rule for one in report.of("ERROR", "WARN")))
print(sorted(name for name in sys.modules if name.startswith("align") and not name.startswith("align.fa")))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", program],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["['fa.lengths.q-raw', 'fa.scale.one']", "['align']"]
