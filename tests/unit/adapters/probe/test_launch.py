"""What workers are told of their launch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from adapters.base import EngineSpec
from adapters.probe.launch import probe_dir, read_launch, write_launch


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    spec = EngineSpec(
        engine="vllm",
        side="reference",
        model_path="/m",
        dtype="float16",
        work_dir=str(tmp_path),
        tp=2,
        dp=3,
        ep=6,
        block_size=64,
        max_model_len=77,
        max_batch=5,
        max_prefill_tokens=66,
        num_blocks=9,
        hold_arrivals=False,
        seed=4,
        device="ascend",
        options={"top_k": 5, "env.X": None},
        patches=("one.py", "two.py"),
        audit=False,
        fa=False,
        collectives=False,
        dp_rank=2,
        master_port=4711,
    )
    defaults = EngineSpec("vllm", "reference", "/m", "float16", str(tmp_path))
    optional = [field.name for field in fields(EngineSpec)][5:]
    assert all(getattr(spec, name) != getattr(defaults, name) for name in optional), "every field is tried"
    for one in (defaults, spec):
        write_launch(one)
        assert read_launch() == replace(one, dp_rank=0), "a worker asks its engine which group it is of"
    assert probe_dir() == tmp_path


def test_a_worker_without_a_launch_says_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"launch\.json"):
        read_launch()
