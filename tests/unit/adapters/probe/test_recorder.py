"""What a recorder keeps of a step, fed by hand as taps feed it, and read back from the trace."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.checkpoints.table import kinds
from tests.unit.adapters.probe.llama_step import LLAMA, ROWS, SLOTS, feed, new, one_step, plain, tensors, trace

# -------------------------------------------------------------------------------------------------------- values


def test_every_value_is_kept_as_it_was(tmp_path: Path) -> None:
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, "*"), 1, 4, "prefill", ROWS)
    during = recorder.active
    feed(recorder, given)
    recorder.end()
    assert (during, recorder.active) == (True, False)
    found, entry = one_step(tmp_path)
    assert (entry.step, entry.phase, entry.rows, entry.failures) == (4, "prefill", ROWS, {})
    assert entry.logits_rows == (("a", 2), ("b", 6))
    names = {str(name) for name in LLAMA.names()}
    assert found.keys(0, 4) == {*names, "token_ids", "positions"}
    for (checkpoint, layer), value in given.items():
        read = found.tensor(0, 4, kinds()[checkpoint].at(layer))
        assert read is not None
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, value), checkpoint
    for name, expected in (
        ("token_ids", [5, 6, 7, 8, 9]),
        ("positions", [0, 1, 2, 5, 6]),
        (f"layers.1.{SLOTS}", [0, 1, 2, 5, 6]),
    ):
        ids = found.tensor(0, 4, name)
        assert ids is not None and ids.dtype == torch.int64
        assert ids.tolist() == expected


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("layers.1.*",), {str(name) for name in LLAMA.names() if name.layer == 1}),
        (("layers.*.attn.q", "logits"), {"layers.0.attn.q", "layers.1.attn.q", "logits"}),
        (("layers.0.mlp.?ate",), {"layers.0.mlp.gate"}),
        (("embed",), {"embed"}),
        ((), set()),
    ],
)
@pytest.mark.parametrize("digest", [False, True])
def test_patterns_choose_the_values(tmp_path: Path, patterns: tuple[str, ...], kept: set[str], digest: bool) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, *patterns, digest=digest), 1, 0, "prefill", ROWS)
    feed(recorder, {key: value for key, value in tensors().items() if recorder.wants(*key)})
    recorder.end()
    found, entry = one_step(tmp_path)
    ids = {"token_ids", "positions", f"layers.0.{SLOTS}", f"layers.1.{SLOTS}"}
    assert {key for key in found.keys(0, 0) if "#" not in key} == kept | ids
    digested = {key.partition("#")[0] for key in found.keys(0, 0) if "#tok" in key}
    everything = {str(name) for name in LLAMA.names() if not name.kind.integer}
    assert digested == (everything if digest else set())
    assert entry.failures == {}


def test_what_nobody_needs_is_not_wanted(tmp_path: Path) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "layers.1.attn.q"), 1, 0, "prefill", ROWS)
    asked = [("attn.q", 1), ("attn.q", 0), ("attn.k", 1), (SLOTS, 0), ("token_ids", None), ("embed", None)]
    assert [recorder.wants(*one) for one in asked] == [True, False, False, True, True, False]
    assert recorder.wants("attn.q", None), "a layer that is not known is told"
    assert not recorder.wants("attn.k", None)
    recorder.begin(plain(tmp_path, residual=True), 2, 0, "prefill", ROWS)
    assert recorder.wants("attn.k", 0) and recorder.wants("embed", None)


def test_a_value_is_copied_when_it_is_seen(tmp_path: Path) -> None:
    recorder, given = new(), tensors()
    ids = torch.tensor([5, 6, 7, 8, 9])
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    for (checkpoint, layer), value in given.items():
        written = value.clone()
        recorder.put(checkpoint, layer, written)
        written.zero_()
    recorder.put("token_ids", None, ids)
    ids.zero_()
    recorder.end()
    found, _ = one_step(tmp_path)
    for (checkpoint, layer), value in given.items():
        read = found.tensor(0, 0, kinds()[checkpoint].at(layer))
        assert read is not None and torch.equal(read, value)
    read = found.tensor(0, 0, "token_ids")
    assert read is not None and read.tolist() == [5, 6, 7, 8, 9]


def test_rows_behind_the_step_are_padding(tmp_path: Path) -> None:
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    padded = {
        key: torch.cat([value, torch.full((3, *value.shape[1:]), float("nan"), dtype=value.dtype)])
        for key, value in given.items()
    }
    feed(recorder, padded, slots=(8, 9, 10, 21, 22, -1, -1, -1))
    recorder.put("token_ids", None, torch.tensor([[5, 6, 7, 8, 9, 0, 0]]))
    recorder.put("positions", None, torch.tensor([0, 1, 2, 5, 6, 0, 0]))
    recorder.end()
    found, entry = one_step(tmp_path)
    assert entry.failures == {}
    for (checkpoint, layer), value in given.items():
        read = found.tensor(0, 0, kinds()[checkpoint].at(layer))
        assert read is not None and torch.equal(read, value), checkpoint
    read = found.tensor(0, 0, "positions")
    assert read is not None and read.tolist() == [0, 1, 2, 5, 6]


def test_steps_of_several_sizes_do_not_mix(tmp_path: Path) -> None:
    recorder, spec = new(), plain(tmp_path, "*", digest=True)
    decode = (RowSpan("a", 3, 1),)
    for step, rows in enumerate((ROWS, decode, ROWS, decode)):
        recorder.begin(spec, 1, step, "decode", rows)
        for (checkpoint, layer), value in tensors(rows, seed=step).items():
            if step != 3 or checkpoint != "attn.q" or layer == 1:
                recorder.put(checkpoint, layer, value)
        recorder.end()
    found = trace(tmp_path)
    assert [entry.rows for entry in found.steps()] == [ROWS, decode, ROWS, decode]
    for step, rows in enumerate((ROWS, decode, ROWS)):
        for (checkpoint, layer), value in tensors(rows, seed=step).items():
            read = found.tensor(0, step, kinds()[checkpoint].at(layer))
            assert read is not None and torch.equal(read, value)
    assert "layers.0.attn.q" not in found.keys(0, 3), "what an earlier step left is not this step's"
    assert "layers.0.attn.q#tok" not in found.keys(0, 3)


# -------------------------------------------------------------------------------------------------------- order


def test_the_batch_of_the_engine_has_another_order(tmp_path: Path) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "embed", digest=True), 1, 0, "mixed", ROWS)
    recorder.reorder(["b", "a"])
    turned = (ROWS[1], ROWS[0])
    recorder.put("embed", None, torch.ones(5, 8, dtype=torch.bfloat16))
    for layer in (0, 1):
        recorder.put(SLOTS, layer, torch.tensor([21, 22, 8, 9, 10]))
    recorder.put("block_tables", None, torch.tensor([[3, 5], [2, 0]]))
    recorder.end()
    found, entry = one_step(tmp_path)
    assert entry.rows == turned
    assert entry.logits_rows == (("b", 6), ("a", 2))
    slots = found.tensor(0, 0, f"layers.0.{SLOTS}")
    assert slots is not None and slots.tolist() == [5, 6, 0, 1, 2]


def test_an_order_of_other_requests_is_refused(tmp_path: Path) -> None:
    recorder = new()
    recorder.reorder(["a"])
    recorder.begin(plain(tmp_path, "*"), 1, 0, "mixed", ROWS)
    for order in (["a"], ["a", "b", "c"], ["a", "a"]):
        with pytest.raises(AssertionError, match="the step computes"):
            recorder.reorder(order)


# ---------------------------------------------------------------------------------------------------- steps, runs


def test_dummy_forwards_leave_nothing(tmp_path: Path) -> None:
    recorder, spec = new(), plain(tmp_path, "*")
    recorder.dummy()
    assert not recorder.active
    recorder.begin(spec, 1, 0, "prefill", ROWS)
    feed(recorder, tensors())
    recorder.dummy()
    assert not recorder.active
    recorder.end()
    recorder.fail("attn.q", 0, ValueError("nobody listens"))
    (dummy,) = trace(tmp_path).steps()
    assert dummy.dummy and not dummy.file, "a dummy forward is marked and holds nothing"
    recorder.begin(spec, 1, 1, "prefill", ROWS)
    recorder.end()
    found, entry = one_step(tmp_path)
    assert found.keys(0, 1) == {"token_ids", "positions"}, "nothing of the forward that was given up"
    assert set(entry.failures) == {"token_ids", "positions"}


def test_a_new_run_has_a_trace_of_its_own(tmp_path: Path) -> None:
    recorder = new()
    for run, directory in enumerate((tmp_path / "one", tmp_path / "two"), start=1):
        for step in range(run):
            recorder.begin(plain(directory, "*"), run, step, "prefill", ROWS)
            feed(recorder, tensors(seed=run))
            recorder.end()
    for run, directory in enumerate((tmp_path / "one", tmp_path / "two"), start=1):
        found = trace(directory)
        assert len(found.steps()) == run
        read = found.tensor(0, 0, "embed")
        assert read is not None and torch.equal(read, tensors(seed=run)["embed", None])


@pytest.mark.parametrize("end", ["last step", "next run"])
def test_sums_over_a_phase_are_all_written(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run reaches its last step, or its requests end early and another run follows."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # nothing is due
    recorder, spec = new(), plain(tmp_path / "one", digest=True)
    squares = torch.zeros(8, dtype=torch.float64)
    for step in range(3):
        rows = (RowSpan("a", step, 1),)
        recorder.begin(spec, 1, step, "decode", rows, last=end == "last step" and step == 2)
        given = tensors(rows, seed=step)
        recorder.put("embed", None, given["embed", None])
        recorder.end()
        squares += (given["embed", None].double() ** 2).sum(0)
    if end == "next run":
        assert trace(tmp_path / "one").accumulated(0, "digest", "decode") == {}
        recorder.begin(plain(tmp_path / "two", digest=True), 2, 0, "decode", ROWS)
    found = trace(tmp_path / "one").accumulated(0, "digest", "decode")
    assert torch.allclose(found["embed#ch_sq"].double(), squares, rtol=1e-5)
    if end == "next run":
        recorder.end()
        assert trace(tmp_path / "two").accumulated(0, "digest", "decode") == {}


def test_ranks_leave_their_shards(tmp_path: Path) -> None:
    structure = replace(LLAMA, tp=2)
    given = [tensors(structure=structure, seed=rank) for rank in (0, 1)]
    for rank in (0, 1):
        recorder = new(structure, rank)
        recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
        feed(recorder, given[rank])
        recorder.end()
    found = trace(tmp_path, tp=2)
    joined = found.joined(0, "layers.1.attn.q")
    assert joined is not None
    assert torch.equal(joined, torch.cat([part["attn.q", 1] for part in given], dim=1))
    partial = found.joined(0, "layers.0.mlp.down_partial")
    assert partial is not None
    assert torch.equal(partial, given[0]["mlp.down_partial", 0].float() + given[1]["mlp.down_partial", 0].float())
