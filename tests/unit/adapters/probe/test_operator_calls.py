"""Calls of attention are written before the operator runs, once for all layers, and outlive its raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import RowSpan
from adapters.probe.cache_calls import CacheCalls, known_operator
from adapters.probe.operator_calls import CallRecorder
from align.fa.files import CallWriter, Records, Row, read_records


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("atb", "FRAGMENT")
    made.define(
        "_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, "
        "float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, *, Tensor? workspace=None) -> ()"
    )

    def attend(query: Any, key_cache: Any, value_cache: Any, num_kv_heads: int, num_heads: int, scale: float,
               block_table: Any, context_lens: Any, out: Any, *, workspace: Any = None) -> None:  # fmt: skip
        context_lens.zero_()  # what it was given is gone afterwards
        if scale > 1:
            raise RuntimeError("refused")

    made.impl("_npu_paged_attention", attend, "CPU")
    yield made
    made._destroy()


def attend(layer: int, recorder: CallRecorder, scale: float = 0.5) -> None:
    cache = torch.zeros(4, 16, 1, 8)
    with recorder.attention(layer, None):
        torch.ops.atb._npu_paged_attention(
            torch.zeros(1, 1, 8),
            cache,
            cache,
            1,
            1,
            scale,
            torch.tensor([[2]]),
            torch.tensor([5]),
            torch.zeros(1, 1, 8),
        )


def begun(directory: Path) -> CallRecorder:
    recorder = CallRecorder(CallWriter(directory, 0), 0)
    recorder.begin(1, 0, "decode", [RowSpan("a", 4, 1, 0)])
    return recorder


def read(directory: Path) -> Records:
    found = read_records(directory)
    assert found is not None
    return found


def test_calls_that_differ_in_their_layer_are_one(library: torch.library.Library, tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    for layer in range(3):
        attend(layer, recorder)
    recorder.end()
    recorder.begin(1, 1, "decode", [RowSpan("a", 5, 1, 0)])
    attend(0, recorder, 0.25)
    recorder.end()
    found = read(tmp_path)
    assert len(found.calls) == 2 and [one.layers for one in found.seen] == [(0, 1, 2), (0,)]
    first = found.seen[0]
    assert (first.step.phase, first.step.rows) == ("decode", (Row("a", 4, 1),))
    assert first.at[0].endswith(" attend")
    values = found.calls[0].arguments
    assert values["context_lens"].values == (5,), "as it was before the operator ran"  # type: ignore[union-attr]
    assert values["scale_value"] == 0.5 and "workspace" not in values


def test_a_call_outlives_the_raise_of_its_operator(library: torch.library.Library, tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    attend(0, recorder)
    with pytest.raises(RuntimeError, match="refused"):
        attend(1, recorder, 2.0)
    found = read(tmp_path)  # the worker ends here
    assert [(one.layers, found.calls[one.call].arguments["scale_value"]) for one in found.seen] == [
        ((0,), 0.5),
        ((1,), 2.0),
    ]


def test_forwards_without_requests_are_left_out(library: torch.library.Library, tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.idle()
    assert not recorder.active
    attend(0, recorder)
    assert read(tmp_path).seen == ()


def test_what_cannot_be_described_is_told_and_the_engine_goes_on(
    library: torch.library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = begun(tmp_path)

    def fail(*_: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(recorder._describer, "describe", fail)
    attend(0, recorder)
    assert read(tmp_path).failures == {"_npu_paged_attention": "ValueError: odd"}


def test_one_mode_tells_both_listeners(library: torch.library.Library, tmp_path: Path) -> None:
    class Indices:
        heard: list[str] = []  # noqa: RUF012

        def before_read(self, call: Any) -> None:
            self.heard.append("read")

        before_write = after_write = before_read

        def fail(self, what: str, error: Exception) -> None:
            self.heard.append(f"{what}: {error}")

    recorder, indices = begun(tmp_path), Indices()
    recorder.at(2)
    cache = torch.zeros(4, 16, 1, 8)
    with CacheCalls(indices, recorder):
        torch.ops.atb._npu_paged_attention(
            torch.zeros(1, 1, 8), cache, cache, 1, 1, 0.5, torch.tensor([[2]]), torch.tensor([5]), torch.zeros(1, 1, 8)
        )
        torch.zeros(1) + 1
    recorder.end()
    assert indices.heard == ["read"] and [one.layers for one in read(tmp_path).seen] == [(2,)]


def test_operators_are_known_in_every_namespace() -> None:
    assert known_operator("npu::npu_fused_infer_attention_score_v2") == "npu_fused_infer_attention_score_v2"
    assert known_operator("atb::_npu_reshape_and_cache") == "_npu_reshape_and_cache"
    assert known_operator("aten::add") is None


def test_the_batch_has_its_own_order(tmp_path: Path) -> None:
    recorder = CallRecorder(CallWriter(tmp_path, 0), 0)
    recorder.begin(1, 0, "prefill", [RowSpan("a", 0, 2, 0), RowSpan("b", 0, 3, 0)])
    recorder.reorder(["b", "a"])
    assert recorder._step is not None and [row.request for row in recorder._step.rows] == ["b", "a"]
