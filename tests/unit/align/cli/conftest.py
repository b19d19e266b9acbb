"""Commands in this process, and what they work on."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from align.cli import capture as capture_module
from align.cli import main
from align.cli import options as options_module
from align.models import qwen3
from envs.profiles import Interpreter
from tests.unit.align.cli.recorded_runs import Align, FakeAlone, FakeSession, make_run
from tests.unit.align.compare import traces


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Align]:
    """Runs ``align …`` in this process; answers ``(exit code, output, errors)``."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["align", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_run(tmp_path / "clean", monkeypatch)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2

    return make_run(tmp_path / "faulty", monkeypatch, double)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    qwen3.build(folder, lambda line: None)
    return folder


@pytest.fixture
def case_file(checkpoint: Path, tmp_path: Path) -> Path:
    file = tmp_path / "case.json"
    requests = [{"name": name, "token_ids": list(ids)} for name, ids in traces.PROMPTS.items()]
    file.write_text(json.dumps({"model": str(checkpoint), "decoding": {"max_new_tokens": 2}, "requests": requests}))
    return file


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[FakeAlone]:
    made: list[FakeAlone] = []
    monkeypatch.setattr(FakeAlone, "made", made, raising=False)
    monkeypatch.setattr(FakeAlone, "error", None)
    monkeypatch.setattr(capture_module, "Alone", FakeAlone)
    monkeypatch.setattr(capture_module, "Session", FakeSession)
    monkeypatch.setattr(
        options_module,
        "resolve",
        lambda device, engine, progress=None: Interpreter(engine, device, Path("/python"), (), {}, True),
    )
    return made
