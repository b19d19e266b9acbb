"""Workers that say who they are, and why they cannot go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.probe.births import Fall, announce, announced, read_falls, told
from envs.home import REPOSITORY


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    return tmp_path


def test_workers_are_known_by_rank(directory: Path) -> None:
    assert announced(directory) == {}
    announce(3)
    announce(0)
    assert announced(directory) == {0: os.getpid(), 3: os.getpid()}
    assert not list(directory.glob("*.tmp"))


def test_an_exception_is_left_and_goes_on(directory: Path) -> None:
    with told(0):
        pass
    assert read_falls(directory) == ()
    with pytest.raises(MemoryError), told(1):
        raise MemoryError("no room")
    with pytest.raises(KeyError), told(2, "step"):
        raise KeyError("layer")
    first, second = read_falls(directory)
    assert (first.rank, first.during, first.error) == (1, "build", "MemoryError: no room")
    assert "test_births.py" in first.traceback and first.traceback.endswith("MemoryError: no room\n")
    assert second == Fall(2, "step", "KeyError: 'layer'", second.traceback)


def test_a_rank_that_only_lost_another_one_is_told_behind_it(directory: Path) -> None:
    for rank, error in enumerate(("[pair.cc:553] Connection closed by peer [::1]:46498", "input is empty", "no room")):
        with pytest.raises(RuntimeError), told(rank, "step"):
            raise RuntimeError(error)
    assert [fall.rank for fall in read_falls(directory)] == [1, 2, 0]


def test_what_an_actor_prints_is_in_the_sides_log(directory: Path) -> None:
    """Ray keeps it in files of its own; the host's output goes there already."""
    script = directory / "default_worker.py"
    script.write_text(
        "import sys\nfrom adapters.probe import boot\nboot.autoload()\nprint('said')\nprint('cried', file=sys.stderr)\n"
    )
    other = script.with_name("other.py")
    other.write_text(script.read_text())
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for one, seen in ((script, ""), (other, "said\n")):
        done = subprocess.run(
            [sys.executable, str(one)], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == seen
    assert sorted((directory / "engine.log").read_text().split()) == ["cried", "said"]
