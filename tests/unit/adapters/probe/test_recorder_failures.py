"""What a recorder could not see: it is named, costs itself alone, and nothing is made up in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.probe import recorder as recorder_module
from adapters.probe.recorder import Recorder
from tests.unit.adapters.probe.llama_step import (
    BLOCK,
    LLAMA,
    ROWS,
    SLOTS,
    NoWeights,
    feed,
    new,
    one_step,
    plain,
    tensors,
    trace,
)


def test_taps_that_could_not_be_hung_up_are_failures_of_every_step(tmp_path: Path) -> None:
    recorder = new()
    recorder.missing = {"layers.1.attn.q": "no such class"}
    for step in range(2):
        recorder.begin(plain(tmp_path, "*"), 1, step, "decode", ROWS)
        feed(recorder, {key: value for key, value in tensors().items() if key != ("attn.q", 1)})
        recorder.end()
    found = trace(tmp_path)
    assert [entry.failures for entry in found.steps()] == [recorder.missing] * 2
    assert found.tensor(0, 1, "layers.1.attn.q") is None
    assert found.tensor(0, 1, "layers.0.attn.q") is not None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4, 4, 2, dtype=torch.bfloat16), "4 rows were seen, the step has 5"),
        (torch.zeros(5, 4, 2), "torch.float32"),
        (torch.zeros(5, 4, 3, dtype=torch.bfloat16), r"\[4, 3\] per row"),
    ],
)
def test_a_tensor_that_does_not_fit_costs_itself_alone(tmp_path: Path, value: Tensor, words: str) -> None:
    """In the second layer: what the first layer left stays."""
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    with pytest.raises(ValueError, match=words):
        feed(recorder, {key: value if key == ("attn.q", 1) else one for key, one in given.items()})
    recorder.fail("attn.q", 1, ValueError("as the tap would say"))
    for key, one in list(given.items())[list(given).index(("attn.q", 1)) + 1 :]:
        recorder.put(*key, one)
    recorder.end()
    found, entry = one_step(tmp_path)
    assert entry.failures["layers.1.attn.q"] == "ValueError: as the tap would say"
    assert found.tensor(0, 0, "layers.1.attn.q") is None
    for name, layer in (("attn.q", 0), ("attn.k", 1), ("mlp.down", 1)):
        read = found.tensor(0, 0, f"layers.{layer}.{name}")
        assert read is not None and torch.equal(read, given[name, layer])


def test_the_first_of_a_name_counts(tmp_path: Path) -> None:
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    feed(recorder, given)
    with pytest.raises(ValueError, match="computed twice"):
        recorder.put("attn.q", 0, torch.zeros_like(given["attn.q", 0]))
    recorder.end()
    read = one_step(tmp_path)[0].tensor(0, 0, "layers.0.attn.q")
    assert read is not None and torch.equal(read, given["attn.q", 0])


@pytest.mark.parametrize(("checkpoint", "layer"), [("attn.q", None), ("embed", 0)])
def test_a_layer_that_is_not_known_is_not_guessed(tmp_path: Path, checkpoint: str, layer: int | None) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "*", digest=True), 1, 0, "prefill", ROWS)
    with pytest.raises(ValueError, match="layer"):
        recorder.put(checkpoint, layer, torch.zeros(5, 8))
    recorder.fail(checkpoint, layer, ValueError("layer"))
    recorder.end()
    assert one_step(tmp_path)[1].failures[checkpoint] == "ValueError: layer"


def test_inputs_that_were_not_seen_are_failures(tmp_path: Path) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "*", digest=True, residual=True), 1, 0, "prefill", ROWS)
    for (checkpoint, layer), value in tensors().items():
        recorder.put(checkpoint, layer, value)
    recorder.put("token_ids", None, torch.tensor([1, 2]))
    for layer in (0, 1):
        recorder.put(SLOTS, layer, torch.tensor([8, 9, 10, 21, 22]))
    recorder.end()
    found, entry = one_step(tmp_path)
    expected = {"token_ids", "positions", f"layers.0.{SLOTS}", f"layers.1.{SLOTS}"}
    assert {name for name in entry.failures if "#" not in name} == expected
    assert all(why for name, why in entry.failures.items()), "what was not derived says why"
    assert f"layers.0.{SLOTS}" not in found.keys(0, 0)
    for name in ("token_ids", "positions"):
        ids = found.tensor(0, 0, name)
        assert ids is not None and ids.tolist() == [-1] * 5


class Known(NoWeights):
    """A model of which the embedding is known."""

    embedding = torch.randn(12, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def weight(self, kind: str, layer: int | None) -> Tensor | None:
        return self.embedding if kind == "embed" else None


@pytest.mark.parametrize("seen", [True, False])
def test_without_its_ids_no_embedding_is_accused(tmp_path: Path, seen: bool) -> None:
    recorder = Recorder(LLAMA, 0, 0, Known(), BLOCK, torch.bfloat16)
    recorder.begin(plain(tmp_path, residual=True), 1, 0, "prefill", ROWS)
    if seen:
        recorder.put("token_ids", None, torch.tensor([5, 6, 7, 8, 9]))
    recorder.put("embed", None, Known.embedding[[5, 6, 7, 8, 9]])
    recorder.end()
    found, _ = one_step(tmp_path)
    worst = found.tensor(0, 0, "embed#res_max")
    assert (worst is not None) == seen
    assert worst is None or worst[0] == 0


@pytest.mark.parametrize("seen", [True, False])
def test_without_its_positions_rope_is_recomputed_where_it_should_be(tmp_path: Path, seen: bool) -> None:
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, residual=True), 1, 0, "prefill", ROWS)
    if seen:
        recorder.put("positions", None, torch.tensor([0, 1, 2, 5, 6]))
    for layer in (0, 1):
        recorder.put("attn.q", layer, given["attn.q", layer])
        recorder.put("attn.q_rope", layer, rotated(given["attn.q", layer], [0, 1, 2, 5, 6]))
    recorder.end()
    worst = one_step(tmp_path)[0].tensor(0, 0, "layers.1.attn.q_rope#res_max")
    assert worst is not None
    assert worst[0] < 2, "in roundings"


def rotated(x: Tensor, positions: list[int]) -> Tensor:
    """Pairs of two channels turned by the position: the only frequency of a head of two channels is 1."""
    angle = torch.tensor(positions, dtype=torch.float64)[:, None]
    a, b = x.double().unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


@pytest.mark.parametrize("tables", [torch.zeros(1, 2, dtype=torch.int32), torch.zeros(4), "none at all"])
def test_a_block_table_that_does_not_fit(tmp_path: Path, tables: Any) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    feed(recorder, tensors())
    recorder.put("block_tables", None, tables)
    recorder.end()
    found, entry = one_step(tmp_path)
    assert set(entry.failures) == {f"layers.0.{SLOTS}", f"layers.1.{SLOTS}"}
    assert f"layers.0.{SLOTS}" not in found.keys(0, 0)
    assert found.tensor(0, 0, "layers.0.attn.q") is not None


def test_a_foreign_slot_is_no_position(tmp_path: Path) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path), 1, 0, "prefill", ROWS)
    feed(recorder, {}, slots=(8, 9, 21, 21, 10))
    recorder.end()
    slots = one_step(tmp_path)[0].tensor(0, 0, f"layers.0.{SLOTS}")
    assert slots is not None and slots.tolist() == [0, 1, -1, 5, -1]


def test_a_step_that_would_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BUFFER_BYTES", 390)
    recorder, given = new(), tensors()
    recorder.begin(plain(tmp_path, "*"), 1, 0, "prefill", ROWS)
    recorder.put("attn.q", 0, given["attn.q", 0])  # 2 layers of 5 × 8 elements of 2 bytes
    recorder.put("attn.q", 1, given["attn.q", 1])
    recorder.put("embed", None, given["embed", None])
    with pytest.raises(MemoryError, match="records of a step of 5 rows exceed"):
        recorder.put("block_in", 0, given["block_in", 0])
    recorder.end()
    assert {"layers.1.attn.q", "embed"} <= one_step(tmp_path)[0].keys(0, 0)
