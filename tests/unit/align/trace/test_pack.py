"""Small records of many checkpoints share a tensor, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from adapters.base import RowSpan
from align.trace.format import StepEntry
from align.trace.pack import PACKS_FILE, Packer, read_lines, unpacked
from align.trace.reader import DamagedFileError, Trace
from align.trace.writer import TraceWriter

NAMES = [f"layers.{layer}.attn.{what}" for layer in range(3) for what in ("q", "k")]
KEYS = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "#tok", "#res_max"])),
    st.tuples(st.sampled_from([(2,), (1, 3)]), st.sampled_from([torch.float32, torch.int64])),
)


@given(KEYS)
def test_every_record_comes_back(records: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]) -> None:
    tensors = {
        name + suffix: (torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (index + 1)).to(dtype)
        for index, ((name, suffix), (shape, dtype)) in enumerate(records.items())
    }
    lines: list[str] = []
    packed = Packer(lambda line: lines.append(f"{line}\n")).pack(tensors)
    places = unpacked(packed, read_lines(lines))
    assert places.keys() == tensors.keys()
    for key, (stored, index) in places.items():
        found = packed[stored] if index is None else packed[stored][index]
        assert found.dtype == tensors[key].dtype
        assert torch.equal(found, tensors[key])
    assert {key for key in packed if not key.startswith("@") and "#" not in key} == {
        key for key in tensors if "#" not in key
    }, "values keep their own names"


def test_steps_share_a_line() -> None:
    lines: list[str] = []
    packer = Packer(lines.append)
    step = {f"{name}#tok": torch.zeros(4) for name in NAMES}
    first, second = packer.pack(step), packer.pack(step)
    assert list(first) == list(second) == ["@0#tok"]
    assert [json.loads(line) for line in lines] == [NAMES]


def test_a_reader_unpacks(tmp_path: Path) -> None:
    write(tmp_path)
    trace = Trace(tmp_path)
    with safe_open(tmp_path / "rank0" / "step00000.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["@0#tok", NAMES[0]]
    assert trace.keys(0, 0) == {NAMES[0], *(f"{name}#tok" for name in NAMES)}
    found = trace.tensor(0, 0, f"{NAMES[4]}#tok")
    assert found is not None
    assert found.tolist() == [4.0, 4.0]
    assert trace.accumulated(0, "residual", "prefill")[f"{NAMES[1]}#res_ch"].tolist() == [1.0]
    assert trace.tensor(0, 0, "layers.9.attn.q#tok") is None


def test_lost_names_are_damage(tmp_path: Path) -> None:
    write(tmp_path)
    lines = tmp_path / "rank0" / PACKS_FILE
    lines.write_text(lines.read_text()[:-1])  # the last line was cut
    with pytest.raises(DamagedFileError, match=PACKS_FILE):
        Trace(tmp_path).tensor(0, 0, f"{NAMES[4]}#tok")
    lines.write_text('{"no": "list"}\n')
    with pytest.raises(DamagedFileError, match="list of names"):
        Trace(tmp_path).keys(0, 0)


def write(directory: Path) -> None:
    writer = TraceWriter(directory, 0)
    tensors = {f"{name}#tok": torch.full((2,), float(index)) for index, name in enumerate(NAMES)}
    writer.write_step(StepEntry(0, "prefill", (RowSpan("a", 0, 2),)), {**tensors, NAMES[0]: torch.zeros(2, 3)})
    sums = {f"{name}#res_ch": torch.full((1,), float(index)) for index, name in enumerate(NAMES)}
    writer.write_accumulated("residual", "prefill", sums)
    writer.close()
    about = {"schema": 2, "dtype": "bfloat16", "model": {}, "layout": {"tp": 1, "dp": 1, "ep": 1}}
    (directory / "trace.json").write_text(json.dumps(about))
