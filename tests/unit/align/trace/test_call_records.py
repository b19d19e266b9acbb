"""What a rank says about its calls survives being written and read."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from align.trace.calls import CALLS_FILE, HOST_FILE, Argument, Call, FloatOperator, HostMove, OperatorCall, call_lines
from align.trace.reader import DamagedFileError, Trace
from align.trace.writer import TraceWriter
from tests.unit.align.compare import traces

TENSOR = Argument("x", "Tensor", "bfloat16", (1, 7, 16), (112, 16, 1), "npu", 2)
INSIDE = OperatorCall("npu::npu_rms_norm", ("vendor.py:4 rms_norm",), (TENSOR, Argument("eps", "float", value="1e-06")))
CALLS = (
    Call("m:Norm.forward", "m.py:3", ("mid", "mlp_norm"), (0, 1), "prefill", 0, 7, (TENSOR,), (INSIDE,)),
    Call("m:Norm.forward", "m.py:3", ("mid", "mlp_norm"), (0, 1), "decode", 1, 2, (TENSOR,)),
    Call("m:embed", "", ("embed",), (None,), "prefill", 0, 7, ()),
)
OPERATOR = FloatOperator("aten::cos", "prefill", 0, ("rotary.py:9 forward",), ("layers.0.attn.q_rope",), "embed")
MOVE = HostMove(
    0, "prefill", True, "aten::cos", ("r.py:9 f",), "aten::to", ("r.py:10 f", "m.py:2 g"), (1, 7, 4), "bfloat16", 2,
    (), "embed", (("layers.0.attn.q_rope", "cos"),),
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    traces.write(tmp_path).close()
    writer = TraceWriter(tmp_path, 0)
    writer.write_lines(CALLS_FILE, call_lines(CALLS, (OPERATOR,), {"aten::odd": "ValueError: odd"}))
    writer.write_lines(HOST_FILE, [])
    writer.write_lines(HOST_FILE, [asdict(MOVE)])
    writer.close()
    return Trace(tmp_path)


def test_they_are_read_as_they_were_written(trace: Trace) -> None:
    found = trace.calls(0)
    assert found.calls == CALLS
    assert found.operators == (OPERATOR,)
    assert found.moves == (MOVE,)
    assert found.failures == (("aten::odd", "ValueError: odd"),)


def test_a_call_is_found_by_checkpoint_and_phase(trace: Trace) -> None:
    found = trace.calls(0)
    assert found.call("mlp_norm", 1, "decode") is CALLS[1] or found.call("mlp_norm", 1, "decode") == CALLS[1]
    assert found.call("mlp_norm", 1) == CALLS[0]
    assert found.call("mlp_norm", 1, "mixed") == CALLS[0]
    assert found.call("embed", None) == CALLS[2]
    assert found.call("mlp_norm", 2) is None


def test_a_trace_without_them_holds_none(tmp_path: Path) -> None:
    found = traces.write(tmp_path).calls(0)
    assert (found.calls, found.operators, found.moves) == ((), (), ())


@pytest.mark.parametrize("kept", [1, 12, 40, 60])
def test_a_cut_last_member_does_not_count(trace: Trace, kept: int) -> None:
    path = trace.directory / "rank0" / HOST_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert trace.calls(0).moves == (MOVE,)


def test_a_recording_of_schema_1_has_plain_lines(trace: Trace) -> None:
    path = trace.directory / "rank0" / HOST_FILE
    text = gzip.decompress(path.read_bytes()).decode()
    path.unlink()
    path.with_suffix("").write_text(text + text[:40])  # a last line that was cut does not count
    assert trace.calls(0).moves == (MOVE,)


@pytest.mark.parametrize("text", ["{not json}\n", json.dumps({"step": 1}) + "\n"])
def test_a_damaged_file_is_named(trace: Trace, text: str) -> None:
    (trace.directory / "rank0" / HOST_FILE).write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DamagedFileError, match=HOST_FILE):
        trace.calls(0)


def test_what_is_no_compressed_file_is_named(trace: Trace) -> None:
    (trace.directory / "rank0" / HOST_FILE).write_bytes(b"not compressed at all")
    with pytest.raises(DamagedFileError, match=HOST_FILE):
        trace.calls(0)


def test_a_second_recording_replaces_the_first(trace: Trace) -> None:
    writer = TraceWriter(trace.directory, 0)
    writer.write_lines(HOST_FILE, [])
    writer.write_lines(CALLS_FILE, [])
    writer.close()
    assert trace.calls(0).calls == ()
