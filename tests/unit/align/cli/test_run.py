"""``align run`` without engines: refusals before anything starts, and what a finished run leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.base import Generation, TokenStep
from align.cli import main
from align.cli import options as options_module
from align.cli import run as run_module
from align.errors import SideError
from align.models import qwen3
from align.run import certify
from align.run.outcome import Outcome, SideOutcome
from align.run.request import load_request
from envs import profiles
from envs.profiles import Interpreter
from tests.unit.align.run import fakes

IDS = (4, 5, 6)
TOKENS = ("--no-tensors",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    qwen3.build(folder, lambda line: None)
    return folder


class FakeSession:
    """Both sides answer what ``free`` and ``forced`` say; nothing is started."""

    free: dict[str, Any]
    again: dict[str, Any]
    fresh: dict[str, Any]
    forced: dict[str, Any]
    made: list[FakeSession]
    error: BaseException | None

    def __init__(
        self,
        case: Any,
        info: Any,
        interpreters: Any,
        directory: Path,
        limits: Any,
        watcher: Any,
        extras: Any,
        audit: bool = True,
        fa: bool = True,
    ) -> None:
        self.case, self.interpreters, self.directory, self.limits = case, interpreters, directory, limits
        self.extras, self.roles, self.audit, self.fa = extras, tuple(interpreters), audit, fa
        self.directories = {role: directory / role for role in interpreters}
        self.outcome = Outcome({role: SideOutcome(interpreters[role].engine) for role in interpreters})
        self.stages: list[str] = []
        self.made.append(self)

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.stages.append("closed")

    def launch(self) -> None:
        self.stages.append("launch")
        for side in self.outcome.sides.values():
            side.launched = fakes.launched()
        if self.error is not None:
            raise self.error

    def generate(self) -> None:
        self.stages.append("generate")
        for role, side in self.outcome.sides.items():
            side.free = self._result(self.free[role])

    def observe(self) -> None:
        self.stages.append("observe")

    def generate_again(self) -> None:
        self.stages.append("again")
        for role, side in self.outcome.sides.items():
            side.again = self._result(self.again.get(role, self.free[role]))

    def generate_fresh(self, roles: Any) -> None:
        self.stages.append("fresh")
        for role in roles:
            usual = self.again.get(role, self.free[role])
            self.outcome.sides[role].fresh = self._result(self.fresh.get(role, usual))

    def replay(self, along: Any = None) -> None:
        self.along = along
        self.stages.append("replay")
        for role, side in self.outcome.sides.items():
            side.replay = self._result(self.forced[role])

    def _result(self, steps: Any) -> Any:
        generations = tuple(Generation(request.name, tuple(steps)) for request in self.case.requests)
        return replace(fakes.result(), generations=generations)


def steps(*ids: int, margin: float = 1.0, chosen: tuple[int, ...] = ()) -> list[TokenStep]:
    """Each id is preferred to its neighbours by ``margin``; ``chosen`` are the ids that were appended."""
    return [
        TokenStep(one, token, ((token, -0.1), (token - 1, -0.1 - margin), (token + 1, -0.1 - margin)))
        for token, one in zip(ids, chosen or ids, strict=True)
    ]


@pytest.fixture
def align(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Runs ``align run …``, or another command that is named, in this process; ``(exit code, output, errors)``."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("LMDEPLOY_PYTHON", "VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)

    def resolve(device: str, engine: str, progress: Any = None) -> Interpreter:
        """The simulated device's environments are not built for this."""
        if device != "simnpu":
            return profiles.resolve(device, engine, progress)
        return Interpreter(engine, device, Path("/env/bin/python"), (), {"OMP_NUM_THREADS": "1"}, True)

    monkeypatch.setattr(options_module, "resolve", resolve)
    monkeypatch.setattr(run_module, "Session", FakeSession)
    monkeypatch.setattr(certify, "evaluate", lambda *_, **__: ())
    state: dict[str, Any] = {
        "free": dict.fromkeys(("candidate", "reference"), steps(*IDS)),
        "forced": dict.fromkeys(("candidate", "reference"), steps(*IDS)),
        "again": {},
        "fresh": {},
        "made": [],
        "error": None,
    }
    for name, value in state.items():
        monkeypatch.setattr(FakeSession, name, value, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        command = () if arguments[:1] in (("resume",), ("replay",)) else ("run",)
        monkeypatch.setattr(sys, "argv", ["align", *command, *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    yield call
    signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------------- refusals

REFUSALS: list[tuple[list[str], str, str]] = [
    (["--model", "qwen33"], "unknown model 'qwen33'", "qwen3"),
    (["--model", ""], "names no model", "qwen3"),
    (["--model", "{tmp}/nowhere"], "nowhere", ""),
    (["--tp", "0"], "tp must be a positive integer", "--tp"),
    (["--tp", "-2"], "tp must be a positive integer", "--tp"),
    (["--tp", "3"], "tp must divide num_attention_heads (4)", "valid tp: 1, 2, 4"),
    (["--dp", "2", "--ep", "2"], "ep must be 1 for a model without experts", "valid ep: 1"),
    (["--dp", "0"], "dp must be a positive integer", "--dp"),
    (["--ep", "5"], "ep must be 1", "--ep"),
    (["--dtype", "float8"], "in bfloat16 or float16", "choose bfloat16 (bf16) or float16 (fp16)"),
    (["--max-new-tokens", "0"], "--max-new-tokens 0 is not possible: it is at least 1", "--max-new-tokens 16"),
    (["--prompts", "{tmp}/twice.jsonl"], "the name 'a' appears more than once, for prompts 1, 3", "a name of its own"),
    (["--max-new-tokens", "99999"], "exceed the", "max_new_tokens"),
    (["--block-size", "-1"], "--block-size -1 is not possible: it is at least 1", "--block-size 16"),
    (["--prompts", "{tmp}/nowhere.jsonl"], "nowhere.jsonl does not exist", "check the path"),
    (["--prompts", "{tmp}/broken.jsonl"], "broken.jsonl", ""),
    (["--prompts", "{tmp}/empty.jsonl"], "empty.jsonl", ""),
    (["--prompts", "{tmp}/both.jsonl"], "exactly one of text, messages and token_ids", ""),
    (["--prompts", "{tmp}/outside.jsonl"], "outside the vocabulary", "correct the id"),
    (["--prompts", "{tmp}/long.jsonl"], "exceed the", "shorten the prompt"),
    (["--prompts", "{tmp}"], "cannot read", "readable file"),
    (["--case", "{tmp}/nowhere.json"], "nowhere.json does not exist", "check the path"),
    (["--case", "{tmp}/broken.jsonl"], "is not JSON", "repair the file"),
    (["--case", "{tmp}/case.json", "--tp", "2"], "--case already decides what --tp would", "leave it out"),
    (["--case", "{tmp}/case.json", "--dtype", "fp16", "--model", "x"], "--model, --dtype would", "leave them out"),
    (["--case", "{tmp}/golden.json"], "the case's candidate is transformers", "lmdeploy, vllm"),
    (["--device", "tpu"], "unknown device 'tpu'", "simnpu"),
    (["--device", "camb"], "not supported yet", "simnpu"),
    (["--device", "ascend"], "LMDEPLOY_PYTHON is not set", "LMDEPLOY_PYTHON=/path"),
    (["--replay", "perhaps"], "--replay perhaps is not known", "auto, always, never"),
    (["--replay", "never"], "tensors are recorded during the replay", "--no-tensors"),
    (["--allow", "luck"], "no condition is called luck", "prefix_caching"),
    (["--policy", "mine"], "--policy mine is not known", "derived, seed"),
    (["--min-coverage", "100.5"], "--min-coverage 100.5 is no percentage", "from 0 to 100"),
    (["--min-coverage", "nan"], "--min-coverage nan is no percentage", "from 0 to 100"),
    (["--values-budget", "-1"], "--values-budget -1 is not a size", "megabytes"),
    (["--set", "tp=2"], "--set tp=2 is not SIDE.NAME=VALUE", "candidate.sampling.top_k=5"),
    (["--set", "middle.tp=2"], "is not SIDE.NAME=VALUE", "candidate, reference"),
    (["--set", "candidate.tp"], "is not SIDE.NAME=VALUE", "candidate, reference"),
    (["--set", "candidate.=2"], "names no option", "candidate.sampling.top_k=5"),
    (["--set", "candidate.a=1", "--set", "candidate.a=2"], "gives a twice", "leave one"),
    (["--patch", "fix.py"], "--patch fix.py is not SIDE=FILE", "candidate=fix.py"),
    (["--patch", "candidate={tmp}/nowhere.py"], "nowhere.py does not exist", "apply(ctx)"),
    (["--patch", "reference={tmp}/full"], "full is not a file", "apply(ctx)"),
    (["--numerics", "native"], "--numerics native is not SIDE=NAME", "candidate, reference"),
    (["--numerics", "candidate=fp64"], "is not SIDE=NAME", "native, fp32-internal"),
    (["--numerics", "candidate=native", "--device", "ascend"], "belongs to the simulated NPU", "leave --numerics out"),
    (["--launch-timeout", "0"], "--launch-timeout 0 is not a time", "for example --launch-timeout 600"),
    (["--launch-timeout", "inf"], "--launch-timeout inf is not a time", "seconds"),
    (["--step-timeout", "nan"], "--step-timeout nan is not a time", "seconds"),
    (["--step-timeout", "-3"], "--step-timeout -3 is not a time", "seconds"),
    (["--out", "{tmp}/full"], "is not an empty directory", "choose another --out"),
    (["--out", "{tmp}/case.json"], "is not an empty directory", "choose another --out"),
    (["--out", "{tmp}/case.json/below"], "cannot be written", "--out"),
]


@pytest.fixture
def inputs(tmp_path: Path, checkpoint: Path) -> Path:
    """Files that the refusals name."""
    folder = tmp_path / "inputs"
    (folder / "full").mkdir(parents=True)
    (folder / "full" / "kept").write_text("mine")
    case = {"model": str(checkpoint), "requests": [{"name": "r0", "token_ids": [1, 2]}]}
    (folder / "case.json").write_text(json.dumps(case))
    (folder / "golden.json").write_text(json.dumps({**case, "candidate": "transformers"}))
    (folder / "broken.jsonl").write_text('{"text": "half')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "twice.jsonl").write_text(
        '{"name": "a", "token_ids": [1]}\n{"token_ids": [2]}\n{"name": "a", "token_ids": [3]}\n'
    )
    (folder / "both.jsonl").write_text('{"text": "a", "token_ids": [1]}\n')
    (folder / "outside.jsonl").write_text('{"token_ids": [1, 99999999]}\n')
    (folder / "long.jsonl").write_text(json.dumps({"token_ids": [1] * 100_000}) + "\n")
    return folder


@pytest.mark.parametrize(("arguments", "words", "hint"), REFUSALS, ids=[" ".join(row[0])[:60] for row in REFUSALS])
def test_bad_input_is_refused(
    align: Callable[..., Any], inputs: Path, checkpoint: Path, arguments: list[str], words: str, hint: str
) -> None:
    given = [argument.replace("{tmp}", str(inputs)) for argument in arguments]
    if "--model" not in given and "--case" not in given:
        given = ["--model", str(checkpoint), *given]
    before = sorted(inputs.rglob("*"))
    code, _, err = align(*given)
    assert code == 2, err
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert words in lines[0] if lines[0].startswith("error: ") else words in err
    assert lines[-1].startswith("next: ")
    assert hint in lines[-1] or hint in err
    assert len(lines[-1]) > len("next: ")
    assert FakeSession.made == [], "something was started"
    assert sorted(inputs.rglob("*")) == before, "something was written"
    assert not (inputs.parent / "home" / "runs").exists(), "a run's directory was made"


def test_debug_shows_where_input_was_refused(align: Callable[..., Any], checkpoint: Path) -> None:
    code, _, err = align("--model", str(checkpoint), "--tp", "0", "--debug")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.strip().splitlines()[-1].startswith("next: ")


# ---------------------------------------------------------------------------------------------------- finished runs


def test_an_aligned_run(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, err = align(
        *TOKENS, "--model", str(checkpoint), "--out", str(out), "--max-new-tokens", "3", "--dtype", "fp16"
    )
    assert (code, err) == (0, "")
    assert "aligned: lmdeploy and vllm generate the same 12 greedy tokens for 4 requests" in text
    assert "\x1b[" not in text
    left = [
        "case.json",
        "junit.xml",
        "report.html",
        "report.md",
        "request.json",
        "result.json",
        "run.json",
        "tokens.json",
    ]
    assert sorted(path.name for path in out.iterdir()) == left
    record = json.loads((out / "run.json").read_text())
    assert record["verdict"] == "aligned"
    assert record["command"][:2] == ["align", "run"]
    (session,) = FakeSession.made
    assert session.stages == ["launch", "generate", "observe", "again", "closed"], "nothing differs: no replay"
    assert session.case.dtype == "float16"
    assert session.directory == out


def test_a_case_repeats_a_run(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert align(*TOKENS, "--model", str(checkpoint), "--out", str(first), "--max-new-tokens", "3")[0] == 0
    assert align(*TOKENS, "--case", str(first / "case.json"), "--out", str(second))[0] == 0
    for name in ("case.json", "tokens.json"):
        assert (first / name).read_text() == (second / name).read_text()
    assert FakeSession.made[0].case == FakeSession.made[1].case


def test_a_run_without_a_name_gets_one(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    assert align(*TOKENS, "--model", str(checkpoint))[0] == 0
    assert align(*TOKENS, "--model", str(checkpoint))[0] == 0
    assert len({session.directory for session in FakeSession.made}) == 2
    assert all(session.directory.parent == tmp_path / "home" / "runs" for session in FakeSession.made)


def test_a_divergence_is_replayed_and_exits_with_one(align: Callable[..., Any], checkpoint: Path) -> None:
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    FakeSession.forced = {"candidate": steps(4, 50, 6, chosen=IDS), "reference": steps(*IDS)}
    code, text, _ = align(*TOKENS, "--model", str(checkpoint))
    assert code == 1
    assert "diverged: lmdeploy and vllm first differ at token 1, in decode" in text
    assert FakeSession.made[0].stages == ["launch", "generate", "observe", "again", "replay", "closed"]


@pytest.mark.parametrize(("mode", "replays"), [("auto", False), ("always", True), ("never", False)])
def test_replay_modes(align: Callable[..., Any], checkpoint: Path, mode: str, replays: bool) -> None:
    assert align(*TOKENS, "--model", str(checkpoint), "--replay", mode)[0] == 0
    assert ("replay" in FakeSession.made[0].stages) is replays


def test_never_means_never(align: Callable[..., Any], checkpoint: Path) -> None:
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    assert align(*TOKENS, "--model", str(checkpoint), "--replay", "never")[0] == 1
    assert "replay" not in FakeSession.made[0].stages


def test_numerics_and_limits_reach_the_sides(align: Callable[..., Any], checkpoint: Path) -> None:
    align(
        *TOKENS,
        "--model",
        str(checkpoint),
        "--numerics",
        "candidate=native",
        "--launch-timeout",
        "7",
        "--step-timeout",
        "8",
    )
    (session,) = FakeSession.made
    assert session.interpreters["candidate"].env == {"OMP_NUM_THREADS": "1", "ALIGN_SIMNPU_NUMERICS": "native"}
    assert "ALIGN_SIMNPU_NUMERICS" not in session.interpreters["reference"].env
    assert (session.limits.launch, session.limits.step) == (7.0, 8.0)


def test_a_failed_side_keeps_what_is_known(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    FakeSession.error = SideError("candidate", "the candidate died", "read its log", ("last words",))
    out = tmp_path / "out"
    code, _, err = align(*TOKENS, "--model", str(checkpoint), "--out", str(out))
    assert code == 2
    assert "last words" in err
    assert FakeSession.made[0].stages == ["launch", "closed"]
    assert sorted(path.name for path in out.iterdir()) == [
        "case.json",
        "junit.xml",
        "report.html",
        "report.md",
        "request.json",
        "result.json",
        "run.json",
    ]
    record = json.loads((out / "run.json").read_text())
    assert (record["verdict"], record["reason"]) == ("not comparable", "the candidate died")
    assert record["sides"]["reference"]["launched"] is not None, "what is known is kept"


def test_a_disk_that_fills_up(
    align: Callable[..., Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = Path.write_text

    def full(self: Path, text: str, **kwargs: Any) -> int:
        if self.name.startswith("tokens"):
            write(self, text[:5], **kwargs)
            raise OSError(28, os.strerror(28))
        return write(self, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "out"
    code, _, err = align(*TOKENS, "--model", str(checkpoint), "--out", str(out))
    assert code == 2
    assert "no space is left" in err
    assert "Traceback" not in err
    assert sorted(path.name for path in out.iterdir()) == ["case.json", "request.json"]


def test_a_side_that_does_not_repeat_itself_is_not_comparable(
    align: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    FakeSession.again = {"reference": steps(4, 5, 7)}
    out = tmp_path / "out"
    code, _, err = align(*TOKENS, "--model", str(checkpoint), "--out", str(out))
    assert code == 2
    assert "the reference does not repeat itself: request r0, token 2 was 6, then 7" in err
    assert "top_k 1" in err
    record = json.loads((out / "run.json").read_text())
    assert record["stability"][1]["unstable"]["request"] == "r0"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_a_run_leaves_behind_is_told(
    align: Callable[..., Any], checkpoint: Path, tmp_path: Path, lang: str
) -> None:
    FakeSession.again = {"reference": steps(4, 5, 7)}
    FakeSession.fresh = {"reference": FakeSession.free["reference"]}
    out = tmp_path / "out"
    code, printed, err = align(*TOKENS, "--model", str(checkpoint), "--out", str(out), "--lang", lang)
    assert code == 1 and "a fresh engine repeats the first: a run leaves something behind" in printed + err
    found = json.loads((out / "result.json").read_text())["findings"][0]
    assert (found["kind"], found["side"], found["positions"]) == (
        "residue",
        "reference",
        [3],
    )  # a prompt of 1, and token 2
    written = (out / ("report.md" if lang == "en" else "report.zh.md")).read_text()
    assert ("does not compute the same in every run" if lang == "en" else "在不同运行中的计算结果不一致") in written


def test_options_of_one_side_reach_that_side(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    patch = tmp_path / "fix.py"
    patch.write_text("def apply(ctx): ...\n")
    align(
        *TOKENS, "--model", str(checkpoint), "--set", "candidate.block=64", "--set", "candidate.name=a b",
        "--set", "reference.env.FLAG=1", "--set", "reference.env.OMP_NUM_THREADS=null",
        "--patch", f"reference={patch}",
    )  # fmt: skip
    (session,) = FakeSession.made
    assert session.extras["candidate"].options == {"block": 64, "name": "a b"}
    assert session.extras["candidate"].patches == ()
    assert session.extras["reference"].patches == (str(patch),)
    assert session.interpreters["reference"].env == {"FLAG": "1"}, "set, or removed, before the interpreter starts"
    assert session.interpreters["candidate"].env == {"OMP_NUM_THREADS": "1"}


def test_the_indices_are_recorded_unless_told_otherwise(
    align: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    for number, more in enumerate(((), ("--no-audit",), ("--no-fa",))):
        out = tmp_path / f"out{number}"
        assert align(*TOKENS, "--model", str(checkpoint), "--out", str(out), *more)[0] == 0
        assert FakeSession.made[-1].audit is ("--no-audit" not in more)
        assert FakeSession.made[-1].fa is ("--no-fa" not in more)
        assert load_request(out).audit is ("--no-audit" not in more)
        assert load_request(out).fa is ("--no-fa" not in more)
