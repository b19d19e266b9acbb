"""Names of the files of a trace, and the lines that describe steps."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from adapters.base import RowSpan
from align.trace import format as trace_format
from align.trace.format import StepEntry, accumulated_file, checkpoint_of, rank_folder, step_file

numbers = st.integers(0, 10**6)
spans = st.builds(RowSpan, st.text(max_size=5), numbers, numbers, numbers)
entries = st.builds(
    StepEntry,
    step=numbers,
    phase=st.sampled_from(("prefill", "decode", "mixed")),
    rows=st.lists(spans, max_size=4).map(tuple),
    dummy=st.booleans(),
    file=st.text(max_size=9),
    bytes=numbers,
    sampled=st.lists(numbers, max_size=4).map(tuple),
    logits_rows=st.lists(st.tuples(st.text(max_size=5), numbers), max_size=4).map(tuple),
    failures=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
)


@given(entries)
def test_an_entry_survives_its_line(entry: StepEntry) -> None:
    line = json.dumps(entry.to_dict())
    assert "\n" not in line
    assert StepEntry.from_dict(json.loads(line)) == entry


def test_a_line_by_hand() -> None:
    entry = StepEntry(3, "decode", (RowSpan("a", 7, 1, 2),), file="f", bytes=9, logits_rows=(("a", 7),))
    assert entry.to_dict() == {
        "step": 3,
        "phase": "decode",
        "rows": [["a", 7, 1, 2]],
        "dummy": False,
        "file": "f",
        "bytes": 9,
        "sampled": (),
        "logits_rows": (("a", 7),),
        "failures": {},
    }


def test_file_names() -> None:
    assert rank_folder(3) == "rank3"
    assert step_file(12) == "step00012.safetensors"
    assert sorted(map(step_file, (0, 9, 10, 99999))) == list(map(step_file, (0, 9, 10, 99999)))
    files = {accumulated_file(which, phase) for which in trace_format.ACCUMULATED for phase in ("prefill", "decode")}
    assert files == {
        "residual-prefill.safetensors",
        "residual-decode.safetensors",
        "digest-prefill.safetensors",
        "digest-decode.safetensors",
    }


def test_the_checkpoint_of_a_key() -> None:
    suffixes = [
        trace_format.TOKEN_DIGEST,
        trace_format.TOKEN_SQUARES,
        trace_format.CHANNEL_DIGEST,
        trace_format.CHANNEL_SQUARES,
        trace_format.TOKEN_RESIDUAL,
        trace_format.WORST_RESIDUAL,
        trace_format.CHANNEL_RESIDUAL,
    ]
    assert len(set(suffixes)) == len(suffixes)
    for suffix in ("", *suffixes):
        assert checkpoint_of(f"layers.3.attn.q{suffix}") == "layers.3.attn.q"
