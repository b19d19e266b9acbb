"""``align next``: the commands that it prints record what the plan of ``align run`` would have recorded."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.run import certify, offline
from align.run.flow import Flow, Wishes
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted

Next = Callable[..., tuple[int, str, str]]


def wrong_up(phase: str, step: int, tensors: dict[str, Any]) -> None:
    tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    (tmp_path / "case.json").write_text(recordings.case().to_text())
    return Scripted(tmp_path)


@pytest.fixture
def next_(align: Next) -> Next:
    return lambda *arguments: align("next", *arguments)


def record(session: Scripted, **wishes: Any) -> None:
    Flow(session, recordings.case(), recordings.info(), Wishes(**wishes)).run()  # type: ignore[arg-type]


def record_apart(session: Scripted, directory: Path) -> None:
    """As two images record: nobody looked closer yet."""
    record(session)
    for role in ("candidate", "reference"):
        shutil.rmtree(directory / role / "closer")


def commands(out: str) -> list[list[str]]:
    return [shlex.split(line) for line in out.splitlines() if line.startswith("align ")]


def test_the_request_that_shows_it_is_recorded_by_itself(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record_apart(session, tmp_path)
    code, out, err = next_(str(tmp_path / "candidate"), str(tmp_path / "reference"))
    assert (code, err) == (0, "")
    first, second, compare = commands(out)
    for command, engine, role in ((first, "lmdeploy", "candidate"), (second, "vllm", "reference")):
        assert command[1:5] == ["capture", engine, "--side", role]
        given = dict(zip(command[3::2], command[4::2], strict=False))
        assert given["--only"] == "r0"
        assert given["--along"] == str(tmp_path / "reference")
        assert given["--case"] == str(tmp_path / "case.json")
        assert given["--out"] == str(tmp_path / f"{role}-next")
        assert "layers.1.*" in [command[at + 1] for at, word in enumerate(command) if word == "--capture"]
    assert compare == ["align", "compare", str(tmp_path / "candidate-next"), str(tmp_path / "reference-next")]


def test_nothing_more_where_nothing_is_wrong(session: Scripted, tmp_path: Path, next_: Next) -> None:
    record(session)
    code, out, _ = next_(str(tmp_path / "candidate"), str(tmp_path / "reference"))
    assert (code, commands(out)) == (0, [])
    assert "nothing more has to be recorded" in out


def test_json(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record_apart(session, tmp_path)
    code, out, _ = next_(str(tmp_path / "candidate"), str(tmp_path / "reference"), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["look"]["checkpoint"] == "layers.1.mlp.up"
    assert len(found["commands"]) == 2
    assert found["findings"][0]["checkpoint"] == "layers.1.mlp.up"


def test_options_and_patches_of_a_side_are_kept(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record_apart(session, tmp_path)
    file = tmp_path / "candidate" / "trace" / "trace.json"
    content = json.loads(file.read_text())
    content["spec"] |= {"options": {"sampling.top_k": 5, "name": "two words"}, "patches": ["/x/fix it.py"]}
    file.write_text(json.dumps(content))
    _, out, _ = next_(str(tmp_path / "candidate"), str(tmp_path / "reference"))
    first, second, _ = commands(out)
    assert [first[at + 1] for at, word in enumerate(first) if word == "--set"] == ["sampling.top_k=5", "name=two words"]
    assert first[first.index("--patch") + 1] == "/x/fix it.py"
    assert "--set" not in second and "--patch" not in second


def test_a_recording_without_its_case_is_refused(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record_apart(session, tmp_path)
    (tmp_path / "case.json").unlink()
    code, _, err = next_(str(tmp_path / "candidate"), str(tmp_path / "reference"))
    assert code == 2
    assert "has no case.json beside it" in err


def test_what_a_run_recorded_of_the_request_counts(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record(session)
    for sides in ((tmp_path / "candidate", tmp_path / "reference"), (tmp_path,)):
        code, out, err = next_(*map(str, sides))
        assert (code, err, commands(out)) == (0, "", [])
        assert "recorded already: r0 by itself, which shows it" in out
        assert "nothing more has to be recorded" in out


def test_a_recording_of_another_request_does_not_count(session: Scripted, tmp_path: Path, next_: Next) -> None:
    session.edits["candidate"] = wrong_up
    record(session)
    file = tmp_path / "candidate" / "closer" / "trace.json"
    content = json.loads(file.read_text())
    content["requests"][0]["name"] = "r1"
    file.write_text(json.dumps(content))
    _, out, _ = next_(str(tmp_path))
    assert "r0 was not recorded by itself yet" in out
    assert len(commands(out)) == 3


def test_one_path_is_a_whole_run(tmp_path: Path, align: Next) -> None:
    for command in ("next", "compare"):
        code, _, err = align(command, str(tmp_path))
        assert code == 2
        assert "is no run, so that a second recording is needed" in err
        assert "does not exist" in align(command, str(tmp_path / "nowhere"))[2]
