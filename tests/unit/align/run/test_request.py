"""``request.json``: what is written reads back, and what has changed since is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.errors import UserError
from align.run.directory import RunDirectory
from align.run.request import RunRequest, digests, load_request, patch_files

TEXTS = st.lists(st.text(max_size=8), max_size=3).map(tuple)


def request(**fields: object) -> RunRequest:
    return RunRequest.model_validate({"fingerprint": "ab", "device": "simnpu", **fields})


def write(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "case.json").write_text("{}")
    (directory / "request.json").write_text(text)
    return directory


@given(
    sets=TEXTS,
    allow=TEXTS,
    symptom=st.none() | st.text(max_size=20),
    along=st.none() | st.dictionaries(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    coverage=st.floats(0, 100),
)
def test_what_is_written_reads_back(
    sets: tuple[str, ...],
    allow: tuple[str, ...],
    symptom: str | None,
    along: dict[str, tuple[int, ...]] | None,
    coverage: float,
) -> None:
    made = request(sets=sets, allow=allow, symptom=symptom, along=along, min_coverage=coverage)
    assert RunRequest.model_validate_json(made.to_text()) == made


def test_it_is_loaded_from_the_directory(tmp_path: Path) -> None:
    made = request(patches=("candidate=/x/fix.py",), named_model=True)
    assert load_request(write(tmp_path / "run", made.to_text())) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "request.json"), ('{"fingerprint": "a"}', "device"), ('{"schema_version": 2}', "schema_version")],
)
def test_a_damaged_request_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_request(write(tmp_path / "run", text))
    assert says in caught.value.message


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no directory"):
        load_request(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no request\.json"):
        load_request(tmp_path)
    (tmp_path / "request.json").write_text(request().to_text())
    with pytest.raises(UserError, match=r"no case\.json"):
        load_request(tmp_path)


def test_a_patch_that_changed_is_refused(tmp_path: Path) -> None:
    fix = tmp_path / "fix.py"
    fix.write_text("def apply(ctx): ...\n")
    made = request(patch_sha256=digests(patch_files([f"candidate={fix}"])))
    made.check_patches()
    fix.write_text("def apply(ctx): pass\n")
    with pytest.raises(UserError, match="is not what it was"):
        made.check_patches()
    fix.unlink()
    with pytest.raises(UserError, match="is not what it was"):
        made.check_patches()


def test_a_cleared_directory_keeps_what_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", tmp_path, "x")
    for name in ("case.json", "request.json", "result.json", "x.tmp"):
        (run.path / name).write_text("")
    (run.path / "candidate" / "trace").mkdir(parents=True)
    run.clear(("case.json", "request.json"))
    assert sorted(path.name for path in run.path.iterdir()) == ["case.json", "request.json"]


def test_a_directory_with_a_run_offers_to_go_on(tmp_path: Path) -> None:
    write(tmp_path / "run", request().to_text())
    with pytest.raises(UserError) as caught:
        RunDirectory(tmp_path / "run", tmp_path, "x")
    assert f"align resume {tmp_path / 'run'}" in caught.value.hint
