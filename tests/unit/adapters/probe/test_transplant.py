"""Tensors of the other side in an engine in small: what is overwritten, what reads it, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.base import RowSpan
from adapters.probe.spec import CaptureSpec, ProbeSpec, SpecReader, TransplantSpec, write_spec
from adapters.probe.taps import Tap, Taps
from adapters.probe.transplant import (
    IN_PLACE,
    INVERSE,
    OTHER_SUM,
    THROUGH_SUM,
    Replaced,
    RowName,
    Transplant,
    read_replaced,
    write_tensors,
)
from align.checkpoints.table import Structure, structure_of
from tests.unit.adapters.probe import llama_step
from tests.unit.adapters.probe.test_taps import QWEN3, TAPS, TP2, Sink
from tests.unit.adapters.probe.toy_engine import Toy

ONE = replace(TP2, tp=1, heads=2, kv_heads=1)
SPANS = (RowSpan("a", 4, 2), RowSpan("b", 0, 1))
ALL: list[RowName] = [("a", 4, 0), ("a", 5, 0), ("b", 0, 0)]


def of(
    directory: Path,
    tensors: Mapping[str, Tensor],
    rows: list[RowName] | None = None,
    structure: Structure = ONE,
    tp_rank: int = 0,
    spans: tuple[RowSpan, ...] = SPANS,
) -> Transplant:
    names = tuple(name for name in tensors if "#" not in name)
    write_tensors(directory, tensors, dict.fromkeys(names, rows or ALL))
    made = Transplant(TransplantSpec(str(directory), names), structure, tp_rank, tp_rank)
    made.rows = spans
    return made


def run(transplant: Transplant, taps: tuple[Tap, ...] = TAPS, structure: Structure = ONE) -> Sink:
    sink, model = Sink(), Toy()
    sink.transplant = transplant
    hung = Taps(taps, model, structure, 0, sink)
    with torch.no_grad():
        model(torch.tensor([1, 2, 3]))
    hung.remove()
    assert not sink.failures
    transplant.leave()
    return sink


def said(directory: Path, rank: int = 0) -> Replaced:
    return read_replaced(directory)[rank]


def clean() -> Sink:
    sink, model = Sink(), Toy()
    hung = Taps(TAPS, model, ONE, 0, sink)
    with torch.no_grad():
        model(torch.tensor([1, 2, 3]))
    hung.remove()
    return sink


def test_a_result_is_replaced_before_anything_reads_it(tmp_path: Path) -> None:
    """One part of a fused projection, in one of three rows: rope reads the new one, all else is as it was."""
    target = torch.full((1, 2, 2), 7.0)
    sink, before = run(of(tmp_path, {"layers.1.attn.q": target}, [("b", 0, 0)])), clean()
    expected = before.seen["attn.q", 1].clone()
    expected[2] = 7.0
    assert torch.equal(sink.seen["attn.q", 1], expected)
    assert torch.equal(sink.seen["attn.q_rope", 1], expected + 100)
    for name in ("attn.k", "attn.v", "attn.value_states", "attn.k_rope"):
        assert torch.equal(sink.seen[name, 1], before.seen[name, 1]), name
    assert torch.equal(sink.seen["attn.q", 0], before.seen["attn.q", 0]), "another layer"
    assert said(tmp_path) == Replaced(0, {"layers.1.attn.q": 1}, {"layers.1.attn.q": [IN_PLACE]})


def test_an_argument_is_replaced_before_the_call(tmp_path: Path) -> None:
    """The toy's cache write empties its argument, so what it was given is known only from before."""
    target = torch.arange(6.0).reshape(3, 1, 2)
    sink = run(of(tmp_path, {"layers.0.attn.key_states": target}))
    assert torch.equal(sink.seen["attn.key_states", 0], target)
    assert said(tmp_path).rows == {"layers.0.attn.key_states": 3}


def test_a_shared_object_is_replaced_in_its_layer_alone(tmp_path: Path) -> None:
    target = torch.full((3, 2, 2), -1.0)
    sink, before = run(of(tmp_path, {"layers.1.attn.q_rope": target})), clean()
    assert torch.equal(sink.seen["attn.q_rope", 1], target)
    assert torch.equal(sink.seen["attn.q_rope", 0], before.seen["attn.q_rope", 0])
    # The toy's output projection reads it: twice itself, then plus five.
    assert torch.equal(sink.seen["attn.o", 1], torch.full((3, 4), 3.0))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_rank_takes_its_own_part(tp_rank: int, tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(3, 4, 2)
    made = of(tmp_path, {"layers.0.attn.q": whole}, structure=TP2, tp_rank=tp_rank)
    native = torch.zeros(3, 8)
    made.at_tap("layers.0.attn.q", native, "qkv.q")
    made.leave()
    assert torch.equal(native[:, :4].reshape(3, 2, 2), whole[:, 2 * tp_rank : 2 * tp_rank + 2])
    assert not native[:, 4:].any()
    assert said(tmp_path, tp_rank).rows == {"layers.0.attn.q": 3}


def test_a_replicated_tensor_is_whole_on_every_rank(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    native = torch.zeros(1, 5, 4)  # padded
    made = of(tmp_path, {"layers.0.attn.o": whole}, structure=TP2, tp_rank=1)
    made.at_tap("layers.0.attn.o", native, "rows1")
    assert torch.equal(native[0, :3], whole)
    assert not native[0, 3:].any()


def test_logits_have_a_row_for_each_request(tmp_path: Path) -> None:
    target = torch.tensor([[5.0] * 5, [6.0] * 5])
    made = of(tmp_path, {"logits": target}, [("b", 0, 0), ("a", 5, 0)])
    native = torch.zeros(2, 5)
    made.at_tap("logits", native, "rows")
    assert native.tolist() == [[6.0] * 5, [5.0] * 5]


def test_rows_of_another_occurrence_stay(tmp_path: Path) -> None:
    made = of(tmp_path, {"layers.0.attn.o": torch.ones(1, 4)}, [("a", 4, 1)])
    native = torch.zeros(3, 4)
    made.at_tap("layers.0.attn.o", native, "rows")
    made.leave()
    assert not native.any()
    assert said(tmp_path).rows == {"layers.0.attn.o": 0}


@pytest.mark.parametrize(("transform", "part"), [("qkv.v", slice(6, 8)), ("qkv.q", slice(0, 4))])
def test_a_form_that_is_a_copy_goes_back_through_its_inverse(transform: str, part: slice, tmp_path: Path) -> None:
    name, heads = f"layers.0.attn.{transform[-1]}", (part.stop - part.start) // 2
    target = torch.arange(100.0, 100.0 + 12 * heads).reshape(6, heads, 2)
    rows: list[RowName] = [("c", at, 0) for at in range(6)]
    made = of(tmp_path, {name: target}, rows, spans=(RowSpan("c", 0, 6),))
    wide = torch.arange(48.0).reshape(2, 3, 8).transpose(0, 1)  # to flatten its rows is to copy them
    kept = wide.clone()
    made.at_tap(name, wide, transform)
    made.leave()
    assert said(tmp_path).how == {name: [INVERSE]}
    assert torch.equal(wide[..., part].reshape(6, heads, 2), target)
    others = [index for index in range(8) if not part.start <= index < part.stop]
    assert torch.equal(wide[..., others], kept[..., others])


# ------------------------------------------------------------------------------------------------------- the stream


class Norm(nn.Module):
    """A fused add and norm, in small: it scales the sum before that is rounded, as kernels do."""

    wrong = 0.0

    def forward(self, x: Tensor, weight: float, residual: Tensor | None = None) -> Any:
        if residual is None:
            return (x.float() * weight).to(x.dtype)
        total = x.float() + residual.float() + self.wrong
        return (total * weight).to(x.dtype), total.to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = Norm(), Norm()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, normal = x, self.norm(x, 2.0)
        else:
            normal, residual = self.norm(x, 2.0, residual=residual)
        normal, residual = self.norm2(normal, 3.0, residual)
        return normal, residual


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        assert residual is not None
        return x, residual


STREAM = tuple(
    Tap(checkpoint, f"layers.{{i}}.{site}", "forward", "*:forward", pick, "rows")
    for checkpoint, site, pick in (
        ("block_in", "norm", "out.1|in.x"),
        ("attn_norm", "norm", "out.0|out"),
        ("mid", "norm2", "out.1"),
        ("mlp_norm", "norm2", "out.0"),
    )
)


def stream(transplant: Transplant | None, model: Blocks | None = None) -> Sink:
    sink, model = Sink(), model or Blocks()
    sink.transplant = transplant
    hung = Taps(STREAM, model, QWEN3, 0, sink)
    with torch.no_grad():
        model(torch.tensor([[0.3], [1.7], [2.9]], dtype=torch.bfloat16).repeat(1, 4))
    hung.remove()
    assert (sink.failures, hung.missing) == ({}, {})
    if transplant is not None:
        transplant.leave()
    return sink


def test_a_sum_is_replaced_with_the_norm_beside_it(tmp_path: Path) -> None:
    stream_part, added = (torch.tensor([[one], [one + 1]]).bfloat16().repeat(1, 4) for one in (1.0078125, 0.00390625))
    target = (stream_part.float() + added.float()).bfloat16()
    given = {"layers.1.mid": target, "layers.1.mid#stream": stream_part, "layers.1.mid#added": added}
    sink, before = stream(of(tmp_path, given, ALL[:2])), stream(None)
    assert torch.equal(sink.seen["mid", 1][:2], target)
    assert torch.equal(sink.seen["mlp_norm", 1][:2], ((stream_part.float() + added.float()) * 3).bfloat16())
    assert torch.equal(sink.seen["mid", 1][2], before.seen["mid", 1][2])
    assert torch.equal(sink.seen["mlp_norm", 1][2], before.seen["mlp_norm", 1][2])
    assert torch.equal(sink.seen["block_in", 1], before.seen["block_in", 1])
    assert said(tmp_path) == Replaced(0, {"layers.1.mid": 2}, {"layers.1.mid": [THROUGH_SUM]})


def test_without_summands_nothing_is_added_to_it(tmp_path: Path) -> None:
    target = torch.tensor([[5.0], [6.0], [7.0]]).bfloat16().repeat(1, 4)
    sink = stream(of(tmp_path, {"layers.1.block_in": target}))
    assert torch.equal(sink.seen["block_in", 1], target)
    assert torch.equal(sink.seen["attn_norm", 1], target * 2)
    assert torch.equal(sink.seen["mid", 1], target * 3), "what follows reads the new stream"


def test_the_first_stream_is_replaced_before_its_norm(tmp_path: Path) -> None:
    target = torch.tensor([[5.0], [6.0], [7.0]]).bfloat16().repeat(1, 4)
    sink = stream(of(tmp_path, {"layers.0.block_in": target}))
    assert torch.equal(sink.seen["block_in", 0], target)
    assert torch.equal(sink.seen["attn_norm", 0], target * 2)
    assert torch.equal(sink.seen["mid", 0], target * 3)
    assert said(tmp_path).rows == {"layers.0.block_in": 3}, "counted once"


def test_a_wrong_sum_is_overwritten_and_noted(tmp_path: Path) -> None:
    model = Blocks()
    for layer in model.layers:
        layer.norm2.wrong = 1.0  # type: ignore[union-attr]
    target = torch.tensor([[5.0], [6.0], [7.0]]).bfloat16().repeat(1, 4)
    sink = stream(of(tmp_path, {"layers.1.mid": target}), model)
    assert torch.equal(sink.seen["mid", 1], target)
    assert said(tmp_path).notes == {"layers.1.mid": OTHER_SUM}


def test_a_norm_is_replaced_alone(tmp_path: Path) -> None:
    target = torch.full((3, 4), 9.0).bfloat16()
    sink, before = stream(of(tmp_path, {"layers.0.mlp_norm": target})), stream(None)
    assert torch.equal(sink.seen["mlp_norm", 0], target)
    assert torch.equal(sink.seen["mid", 0], before.seen["mid", 0])
    assert torch.equal(sink.seen["block_in", 1], target + before.seen["mid", 0])


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "transform"), [("layers.0.attn.kv_start_indices", "slots"), ("layers.0.attn.o_partial", "rows")]
)
def test_what_has_no_inverse_is_refused(name: str, transform: str, tmp_path: Path) -> None:
    made = of(tmp_path, {name: torch.ones(3, 4)}, structure=TP2)
    assert made.name(name.removeprefix("layers.0."), 0) is None
    made.leave()
    assert said(tmp_path).failures[name].startswith("no inverse: ")
    assert said(tmp_path).rows == {name: 0}


@pytest.mark.parametrize(
    ("native", "why"),
    [
        (torch.zeros(3, 5), "[5] per row here, [4] on the other side"),
        (torch.zeros(2, 4), "2 rows were seen, the step has 3"),
        ("nothing", "the tap holds a str"),
    ],
)
def test_what_does_not_fit_is_said_and_does_not_stop_the_engine(native: Any, why: str, tmp_path: Path) -> None:
    made = of(tmp_path, {"layers.0.attn.o": torch.ones(3, 4)})
    made.at_tap("layers.0.attn.o", native, "rows")
    made.leave()
    assert said(tmp_path).failures == {"layers.0.attn.o": why}
    assert said(tmp_path).rows == {"layers.0.attn.o": 0}


def test_a_call_without_the_value_is_said(tmp_path: Path) -> None:
    taps = tuple(replace(one, pick="out.7") if one.checkpoint == "attn.o" else one for one in TAPS)
    sink, model = Sink(unwanted="attn.o"), Toy()
    sink.transplant = of(tmp_path, {"layers.0.attn.o": torch.ones(3, 4)})
    hung = Taps(taps, model, ONE, 0, sink)
    model(torch.tensor([1, 2, 3]))
    hung.remove()
    sink.transplant.leave()
    assert said(tmp_path).failures == {"layers.0.attn.o": "the call has no out.7"}


def test_missing_and_damaged_files_are_said(tmp_path: Path) -> None:
    for place in ("missing", "damaged"):
        (tmp_path / place).mkdir()
    (tmp_path / "damaged" / "tensors.safetensors").write_bytes(b"\xff" * 20)
    for place in ("missing", "damaged"):
        made = Transplant(TransplantSpec(str(tmp_path / place), ("embed", "nonsense")), ONE, 0, 0)
        assert made.name("embed", None) is None
        made.leave()
        failures = said(tmp_path / place).failures
        assert "cannot be read" in failures["embed"]
        assert "not a checkpoint" in failures["nonsense"]


# ------------------------------------------------------------------------------------------------- spec and recorder


def test_a_spec_carries_it_to_the_workers(tmp_path: Path) -> None:
    capture = CaptureSpec("/trace", ("logits",), False, False, transplant=TransplantSpec("/given", ("embed", "logits")))
    write_spec(tmp_path, ProbeSpec(3, 5, {}, capture))
    read = SpecReader(tmp_path).read()
    assert read is not None
    assert read.capture == capture


def test_the_recorder_replaces_records_and_reports(tmp_path: Path) -> None:
    structure = structure_of(llama_step.MODEL)
    rows: list[RowName] = [("b", 5, 0), ("b", 6, 0)]
    target = torch.full((2, 8), 3.0).bfloat16()
    write_tensors(tmp_path / "given", {"layers.1.mlp_norm": target}, {"layers.1.mlp_norm": rows})
    spec = replace(
        llama_step.plain(tmp_path / "trace", "layers.1.mlp_norm"),
        transplant=TransplantSpec(str(tmp_path / "given"), ("layers.1.mlp_norm",)),
    )
    recorder = llama_step.new(structure)
    recorder.begin(spec, 1, 0, "prefill", llama_step.ROWS)
    recorder.reorder(["b", "a"])
    assert recorder.transplant is not None
    native = torch.zeros(1, 5, 8, dtype=torch.bfloat16)
    recorder.transplant.at_tap("layers.1.mlp_norm", native, "rows1")
    assert native[0].tolist() == [[3.0] * 8] * 2 + [[0.0] * 8] * 3
    llama_step.feed(recorder, {("mlp_norm", 1): native[0]})
    recorder.end()
    assert said(tmp_path / "given").rows == {"layers.1.mlp_norm": 2}
    trace, entry = llama_step.one_step(tmp_path / "trace")
    recorded = trace.tensor(0, entry.step, "layers.1.mlp_norm")
    assert recorded is not None
    assert torch.equal(recorded, native[0])
    assert said(tmp_path / "given").failures == {}


def test_the_next_run_computes_for_itself(tmp_path: Path) -> None:
    recorder = llama_step.new()
    plain = llama_step.plain(tmp_path / "trace", "logits")
    write_tensors(tmp_path, {"logits": torch.ones(1, 12)}, {"logits": [("b", 6, 0)]})
    recorder.begin(replace(plain, transplant=TransplantSpec(str(tmp_path), ("logits",))), 1, 0, "decode", SPANS)
    during = recorder.transplant
    recorder.begin(plain, 2, 0, "decode", SPANS)
    assert (during is None, recorder.transplant) == (False, None)
