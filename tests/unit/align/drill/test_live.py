"""Engines that stay up between trials: launched once, given each trial's patches, and given up when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES, Observation
from align.drill.live import LivePair
from align.errors import SideError, UserError
from align.run import session as session_module
from align.run.plan import SideExtras
from envs.profiles import Interpreter
from tests.unit.align.run import fakes


class Side:
    """Notes what is asked of it; ``fails`` names what raises."""

    log: list[str]
    fails: str

    def __init__(self, hosts: Any, role: str, interpreter: Interpreter, directory: Path, *rest: Any) -> None:
        self.role, self.engine, self.directory = role, interpreter.engine, directory
        directory.mkdir(parents=True)

    def _do(self, what: str) -> None:
        self.log.append(f"{self.role} {what}")
        if what == self.fails and self.role == "candidate":
            raise SideError(self.role, "it broke", "mend it")

    def launch(self, spec: Any) -> Any:
        self._do("launch")
        (self.directory / "ledger").mkdir()
        (self.directory / "launch.json").write_text("{}")
        return fakes.launched()

    def repatch(self, files: tuple[str, ...]) -> None:
        self._do(f"patches {' '.join(files)}".rstrip())

    def observe(self) -> list[Observation]:
        return [Observation("tp", 1, self.role)]

    def generate(self, requests: Any, top_k: int) -> Any:
        self._do("generate")
        (self.directory / "trace").mkdir(exist_ok=True)
        return fakes.result(r0=(5,))

    def close(self) -> None:
        self._do("close")


class Hosts:
    waits_for = "nothing"
    run_id = "none"

    def __enter__(self) -> Hosts:
        return self

    def close(self) -> None:
        Side.log.append("hosts close")

    def start(self, *given: Any) -> Any:
        raise AssertionError("sides are scripted")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(Side, "log", events, raising=False)
    monkeypatch.setattr(Side, "fails", "", raising=False)
    monkeypatch.setattr(session_module, "Side", Side)
    monkeypatch.setattr(session_module, "_POLL_SECONDS", 0.01)
    return events


class Heard(list[tuple[str, str, str]]):
    def update(self, role: str, stage: str, detail: str) -> None:
        self.append((role, stage, detail))


def pair(tmp_path: Path) -> LivePair:
    interpreters = {
        role: Interpreter(engine, "simnpu", Path("/python"), (), {}, True)
        for role, engine in zip(SIDES, ("lmdeploy", "vllm"), strict=True)
    }
    return LivePair(fakes.case(), fakes.info(), interpreters, tmp_path / "pair", hosts=Hosts())


def test_trials_share_a_launch_and_each_has_its_own_patches(log: list[str], tmp_path: Path) -> None:
    with pair(tmp_path) as up:
        for file in ("/one.py", ""):
            extras = {"reference": SideExtras(patches=(file,) if file else ())}
            trial = up.trial(fakes.case(), extras, Heard())
            with trial:
                assert not (tmp_path / "pair" / "candidate" / "trace").exists(), (
                    "what the trial before recorded is gone"
                )
                assert (tmp_path / "pair" / "candidate" / "ledger").is_dir(), "the workers' own files are open"
                trial.launch()
                trial.generate()
            assert trial.outcome.sides["reference"].free == fakes.result(r0=(5,))
            assert trial.outcome.sides["candidate"].observations and not up.broken
    assert [one for one in log if "launch" in one] == ["candidate launch", "reference launch"] or [
        one for one in log if "launch" in one
    ] == ["reference launch", "candidate launch"]
    patches = [one for one in log if "patches" in one]
    assert sorted(patches) == [
        "candidate patches", "candidate patches", "reference patches", "reference patches /one.py",
    ]  # fmt: skip
    assert log[-1] == "hosts close" and {"candidate close", "reference close"} <= set(log)


@pytest.mark.parametrize("fails", ["patches", "generate"])
def test_a_side_that_fails_ends_the_pair(
    fails: str, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the trial goes on without it, as a flow does whose first finding stands."""
    with pair(tmp_path) as up:
        monkeypatch.setattr(Side, "fails", fails)
        with up.trial(fakes.case(), {}, Heard()) as trial:
            if fails == "generate":
                trial.launch()
            with pytest.raises(SideError, match="it broke"):
                trial.generate() if fails == "generate" else trial.launch()
        assert up.broken
    assert "candidate close" not in log, "nothing is asked of it any more"
    assert log[-1] == "hosts close"


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (UserError("refused", "allow it"), False),
        (SideError("candidate", "gone", "look"), True),
        (ValueError("a defect"), True),
    ],
)
def test_a_run_that_is_refused_leaves_the_engines_up(
    error: Exception, broken: bool, log: list[str], tmp_path: Path
) -> None:
    with pair(tmp_path) as up:
        with pytest.raises(type(error)), up.trial(fakes.case(), {}, Heard()):
            raise error
        assert up.broken == broken
        if not broken:
            with up.trial(fakes.case(), {}, Heard()) as trial:
                trial.launch()
                trial.generate()
            assert trial.outcome.sides["reference"].free == fakes.result(r0=(5,))


def test_engines_that_do_not_start_are_told(log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Side, "fails", "launch")
    with pytest.raises(SideError), pair(tmp_path):
        raise AssertionError("not reached")
    assert log[-1] == "hosts close"
