"""``align capture``, ``compare``, ``export`` and ``taps`` without engines."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from adapters.probe.spec import CaptureSpec
from align.cli import capture as capture_module
from align.cli import main
from align.cli import options as options_module
from align.errors import SideError
from align.models import qwen3
from align.run import alone, certify, offline
from align.run.flow import Flow, Wishes
from align.run.outcome import Outcome, SideOutcome
from align.run.stability import Stability
from align.trace.reader import Trace
from envs.profiles import Interpreter
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings

Align = Callable[..., tuple[int, str, str]]


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


def make_run(directory: Path, monkeypatch: pytest.MonkeyPatch, edit: traces.Edit | None = None, **wishes: Any) -> Path:
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    session: Any = recordings.Scripted(directory)
    if edit is not None:
        session.edits["candidate"] = edit
    Flow(session, recordings.case(), recordings.info(), Wishes(**wishes)).run()
    return directory


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_run(tmp_path / "clean", monkeypatch)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def double(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2

    return make_run(tmp_path / "faulty", monkeypatch, double)


# -------------------------------------------------------------------------------------------------------- compare


def test_compare_says_what_the_run_said(align: Align, clean: Path, faulty: Path) -> None:
    code, text, err = align("compare", str(clean / "candidate"), str(clean / "reference"))
    assert (code, err) == (0, "")
    assert (
        "aligned: lmdeploy and vllm generate the same 4 greedy tokens for 2 requests, and every tensor is equal" in text
    )
    code, text, _ = align("compare", str(faulty / "candidate"), str(faulty / "reference"))
    assert code == 1
    assert "diverged: Path B" in text
    assert "layers.1.mlp.up" in text


def test_compare_writes_what_it_found(align: Align, faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "found.json"
    sides = [str(faulty / role) for role in SIDES]
    code, text, _ = align("compare", *sides, "--json", str(file), "--quiet")
    assert code == 1
    assert len(text.splitlines()) == 1
    found = json.loads(file.read_text())
    assert found["findings"][0]["checkpoint"] == "layers.1.mlp.up"
    assert found["environment"]["traces"] == dict(zip(SIDES, sides, strict=True))
    assert found["details"]["tensors"]["first_divergence"]["name"] == "layers.1.mlp.up"


def test_compare_refuses_with_a_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    sides = [str(clean / role) for role in SIDES]
    file = tmp_path / "found.json"
    for arguments, words in (
        (["compare", str(clean), sides[1]], "is a whole run"),
        (["compare", sides[0], str(tmp_path / "nowhere")], "does not exist"),
        (["compare", *sides, "--policy", "mine"], "--policy mine is not known"),
        (["compare", *sides, "--allow", "luck"], "no condition is called luck"),
        (["compare", *sides, "--json", str(clean / "candidate" / "trace" / "trace.json" / "x")], "cannot be written"),
    ):
        code, _, err = align(*arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
        assert "Traceback" not in err
    content = json.loads((clean / "candidate" / "trace" / "trace.json").read_text())
    content["requests"].pop()
    (clean / "candidate" / "trace" / "trace.json").write_text(json.dumps(content))
    assert align("compare", *sides, "--json", str(file))[0] == 2
    found = json.loads(file.read_text())
    assert found["verdict"] == "not comparable"
    assert "different prompts" in found["reason"]


def test_compare_demands_coverage(align: Align, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.attn.q_rope"]

    run = make_run(tmp_path / "run", monkeypatch, without, min_coverage=0.0)
    sides = [str(run / role) for role in SIDES]
    file = tmp_path / "found.json"
    code, _, err = align("compare", *sides, "--json", str(file))
    assert code == 2
    assert "97.5 % of 40" in err
    assert "layers.0.attn.q_rope (not recorded by the candidate)" in err
    assert "--min-coverage 97.5" in err
    found = json.loads(file.read_text())
    assert (found["verdict"], found["coverage"]["demanded"], found["findings"]) == ("not comparable", 100.0, [])
    code, text, _ = align("compare", *sides, "--json", str(file), "--min-coverage", "97.5")
    assert code == 0
    assert "every tensor that was compared is equal" in text
    assert json.loads(file.read_text())["coverage"]["demanded"] == 97.5
    for wrong in ("101", "-1", "nan"):
        code, _, err = align("compare", *sides, "--min-coverage", wrong)
        assert code == 2
        assert f"--min-coverage {wrong} is no percentage" in err
        assert "next: " in err


def test_what_hand_written_files_leave_open_is_said(align: Align, tmp_path: Path) -> None:
    right = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for side, factor in (("a", 1.0), ("b", 1.01), ("same", 1.0)):
        (tmp_path / side).mkdir()
        torch.save(right * factor, tmp_path / side / "layer1_attn_out_rank0.pt")
    code, text, _ = align("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q")
    assert code == 0
    assert "operators could not be judged: no inputs or weights" in text
    assert "--policy seed judges by 1e-3" in text
    assert align("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q", "--policy", "seed")[0] == 1
    code, text, _ = align("compare", str(tmp_path / "a"), str(tmp_path / "same"))
    assert code == 0
    assert "could not be judged" not in text, "the same bits leave nothing open"
    assert "OpenCompass" not in text
    assert "next: record both engines" in text
    torch.save({}, tmp_path / "same" / "layer1_mlp_down_rank0.pt")
    code, text, err = align("compare", str(tmp_path / "a"), str(tmp_path / "same"), "-q", "--min-coverage", "0")
    assert (code, text) == (2, "")
    assert "layer1_mlp_down_rank0.pt holds a dict" in err


def test_export_into_a_full_directory_has_one_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    _, _, err = align("export", str(clean / "candidate"), "--out", str(tmp_path))
    assert err.splitlines()[-1] == "next: choose another --out"


# --------------------------------------------------------------------------------------------------- export, taps


def test_export_and_compare_the_files(align: Align, clean: Path, tmp_path: Path) -> None:
    for role in SIDES:
        code, text, err = align("export", str(clean / role), "--format", "pt", "--out", str(tmp_path / role))
        assert (code, err) == (0, "")
        assert "canonical shapes" in text
        assert "next: align compare" in text
    assert (tmp_path / "candidate" / "step00000" / "layer1_mlp_up_output_rank0.pt").is_file()
    code, text, _ = align("compare", str(tmp_path / "candidate"), str(tmp_path / "reference"))
    assert code == 0
    assert "aligned" in text


def test_export_refuses_with_a_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("mine")
    trace = str(clean / "candidate")
    for arguments, words in (
        ([trace, "--format", "npz", "--out", str(tmp_path / "o")], "--format npz is not known"),
        ([trace, "--out", str(tmp_path / "full")], "is not empty"),
        ([str(tmp_path / "nowhere"), "--out", str(tmp_path / "o")], "does not exist"),
        ([trace, "--out", str(tmp_path / "full" / "kept" / "below")], "cannot be written"),
    ):
        code, _, err = align("export", *arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("which", ["clean", "faulty"])
def test_native_shapes_are_compared_as_canonical_ones(
    align: Align, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(which)
    found = []
    for native in ([], ["--native"]):
        directories = [str(tmp_path / f"{role}{len(native)}") for role in SIDES]
        for role, directory in zip(SIDES, directories, strict=True):
            code, text, _ = align("export", str(run / role), "--out", directory, *native)
            assert code == 0
            assert (f"shapes as {recordings.ENGINES[role]} has them" if native else "canonical shapes") in text
            assert ("canonical shapes: attn.kv_start_indices: its transform has no inverse" in text) == bool(native)
        file = tmp_path / f"found{len(native)}.json"
        assert align("compare", *directories, "--json", str(file))[0] == (1 if which == "faulty" else 0)
        content = json.loads(file.read_text())
        del content["command"], content["timing"], content["environment"]
        found.append(content)
    assert found[0] == found[1]
    assert bool(found[1]["findings"]) == (which == "faulty")
    q = tmp_path / "candidate1" / "step00000" / "layer0_attn_qkv_output_rank0.pt"
    assert torch.load(q, weights_only=True).shape == (1, 5, (4 + 2 + 2) * 4)


def test_native_shapes_of_an_unknown_engine(align: Align, clean: Path, tmp_path: Path) -> None:
    file = clean / "candidate" / "trace" / "trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "engine": "sglang"}))
    code, _, err = align("export", str(clean / "candidate"), "--out", str(tmp_path / "o"), "--native")
    assert code == 2
    assert "the shapes of sglang are not known" in err
    assert "next: export it without --native" in err
    assert not (tmp_path / "o").exists()


def test_taps_are_printed(align: Align) -> None:
    code, text, _ = align("taps", "lmdeploy")
    assert code == 0
    header, *rows = [line.split("\t") for line in text.splitlines()]
    assert header == ["checkpoint", "where", "pick", "transform", "inverse"]
    assert any(row[0] == "attn.out" and "dlinfer" in row[1] for row in rows)
    code, _, err = align("taps", "sglang")
    assert code == 2
    assert "align taps lmdeploy" in err


# -------------------------------------------------------------------------------------------------------- capture


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


class FakeAlone:
    """Records nothing; remembers how it was asked."""

    made: list[FakeAlone]
    error: Exception | None = None

    def __init__(
        self, session: Any, case: Any, info: Any, directory: Path, budget: int, values: Any = (), **_: Any
    ) -> None:
        self.session, self.case, self.directory, self.budget, self.values = session, case, directory, budget, values
        self.made.append(self)

    def run(self, along: Any = None) -> alone.Recorded:
        self.along = along
        if self.error is not None:
            raise self.error
        found = (recordings.condition("ok", "eager"), recordings.condition("unknown", "warmup"))
        return alone.Recorded(("embed",), 1, 2, 3, 4, 5000, Stability("candidate", 4, None, 0.0), found)


class FakeSession:
    def __init__(self, case: Any, info: Any, interpreters: Any, directory: Path, *rest: Any, **more: Any) -> None:
        self.interpreters, self.extras, self.more = interpreters, rest[-1], more
        self.outcome = Outcome({role: SideOutcome("x") for role in interpreters})


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


def test_capture_records_one_engine(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, err = align("capture", "vllm", "--case", str(case_file), "--out", str(out), "--set", "seed=3")
    assert (code, err) == (0, "")
    assert "reference: 1 of 2 checkpoints recorded, values of 1; 4 rows in 3 steps; 5 kB" in text
    assert "warmup is unknown" in text
    assert "eager is" not in text
    assert f"next: align capture lmdeploy --case {out}/case.json --along {out} --out OTHER" in text
    assert sorted(path.name for path in out.iterdir()) == ["case.json", "tokens.json"]
    (made,) = recorder
    assert made.along is None
    assert made.session.extras["reference"].options == {"seed": 3}
    assert made.session.more["directories"] == {"reference": out / "engine"}
    assert (made.case.candidate, made.case.reference) == ("lmdeploy", "vllm")
    assert made.budget == 512 * 10**6


def test_capture_follows_another_trace(
    align: Align, recorder: list[FakeAlone], case_file: Path, clean: Path, tmp_path: Path
) -> None:
    out, along = tmp_path / "out", clean / "reference"
    code, text, _ = align("capture", "lmdeploy", "--case", str(case_file), "--out", str(out), "--along", str(along))
    assert code == 0
    assert recorder[0].along == recordings.generations()
    assert f"next: align compare {out} {along}" in text


def test_capture_takes_any_role(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert align("capture", "lmdeploy", "--case", str(case_file), "--out", out, "--side", "reference", "-q")[0] == 0
    (made,) = recorder
    assert (made.case.candidate, made.case.reference) == ("lmdeploy", "lmdeploy")
    assert set(made.session.interpreters) == {"reference"}


def test_capture_refuses_with_a_remedy(
    align: Align, recorder: list[FakeAlone], case_file: Path, clean: Path, tmp_path: Path
) -> None:
    other = json.loads(case_file.read_text())
    other["requests"][0]["token_ids"] = [9]
    (tmp_path / "other.json").write_text(json.dumps(other))
    start = ["capture", "vllm", "--case", str(case_file), "--out", str(tmp_path / "out")]
    for arguments, words in (
        (["capture", "sglang", *start[2:]], "sglang is no engine that is recorded"),
        ([*start, "--side", "left"], "--side left is not known"),
        ([*start, "--set", "seed"], "--set seed is not NAME=VALUE"),
        ([*start, "--patch", str(tmp_path / "no.py")], "no.py does not exist"),
        ([*start, "--along", str(tmp_path)], "is no trace"),
        ([*start[:3], str(tmp_path / "other.json"), *start[4:], "--along", str(clean / "reference")], "other prompts"),
        ([*start[:3], str(tmp_path / "nowhere.json"), *start[4:]], "nowhere.json does not exist"),
        ([*start, "--step-timeout", "0"], "is not a time"),
        ([*start, "--capture", "layers.9?.*"], "--capture layers.9?.* matches none of the model's"),
    ):
        code, _, err = align(*arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
        assert "Traceback" not in err
    assert recorder == []
    assert not (tmp_path / "out").exists()


def test_a_side_that_fails(
    align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeAlone, "error", SideError("reference", "the reference died", "read its log", ("last",)))
    code, _, err = align("capture", "vllm", "--case", str(case_file), "--out", str(tmp_path / "out"))
    assert code == 2
    assert "last" in err
    assert "the reference died" in err


@pytest.mark.parametrize("existed", [True, False])
def test_a_recording_that_failed_can_be_tried_again(
    align: Align,
    recorder: list[FakeAlone],
    case_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    existed: bool,
) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    log = out / "engine" / "engine.log"

    def fail(self: FakeAlone, along: Any = None) -> Any:
        log.parent.mkdir()
        log.write_text("why it failed")
        raise SideError("reference", "the reference died", f"leave out --set reference.seed=3; its log is {log}")

    command = ["capture", "vllm", "--case", str(case_file), "--out", str(out), "--set", "seed=3"]
    with monkeypatch.context() as failing:
        failing.setattr(FakeAlone, "run", fail)
        code, _, err = align(*command)
    assert code == 2
    (kept,) = (tmp_path / "home" / "logs").iterdir()
    assert kept.read_text() == "why it failed"
    assert f"leave out --set seed=3; its log is {kept}" in err
    assert out.exists() == existed
    assert not existed or not any(out.iterdir())
    assert align(*command)[0] == 0
    assert (out / "tokens.json").exists()


def test_alone_records_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    monkeypatch.setattr(certify, "evaluate", lambda *_, **given: (recordings.condition("false"),))
    session: Any = recordings.Scripted(tmp_path / "run")
    session.roles = ("reference",)
    del session.outcome.sides["candidate"]
    out = tmp_path / "trace"
    recorded = alone.Alone(session, recordings.case(), recordings.info(), out, 10**9).run()
    assert session.stages == ["launch", "generate", "observe", "again", "record", "closed"]
    assert (len(recorded.checkpoints), recorded.values, recorded.expected) == (40, 40, 40)
    assert (recorded.steps, recorded.rows) == (2, 7)
    assert recorded.stable.stable
    assert [one.verdict for one in recorded.conditions] == ["false"], "told, and judged when two are compared"
    manifest = Trace(out).manifest
    assert (manifest["side"], manifest["conditions"]) == ("reference", [])
    assert session.outcome.sides["reference"].captures == [CaptureSpec(str(out))]
